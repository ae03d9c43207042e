/* NVML: the same GPUs and their MIG instances, who is on them and how much each has, and how they reach each other. */
#define _GNU_SOURCE
#include "nullgpu.h"
#define NVML_NO_UNVERSIONED_FUNC_DEFS
#include <nvml.h>
#include <stdio.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#define UNIT(d) ((int)(uintptr_t)(d) - 1) /* a handle is a unit's number, from one on */
#define OF(d) (&ng()->units[UNIT(d)])
/* A GPU that is lost answers nothing. */
#define LIVE(d) do { if (ng_settings_of(OF(d)->gpu)->error || lost_by_environment(OF(d)->gpu)) return NVML_ERROR_GPU_IS_LOST; } while (0)

#define DEVICE(i) ((nvmlDevice_t)(uintptr_t)((i) + 1))
static int inits;
static int lost_by_environment(int gpu) {
    for (int i = 0; i < ng()->count; i++) if (ng_of(i)->gpu == gpu) return ng_error(i) != 0;
    return 0;
}
nvmlReturn_t nvmlInit_v2(void) { if (!ng()->gpus) return NVML_ERROR_DRIVER_NOT_LOADED; inits++; return NVML_SUCCESS; }
nvmlReturn_t nvmlInit(void) { return nvmlInit_v2(); }
nvmlReturn_t nvmlInitWithFlags(unsigned flags) { return nvmlInit_v2(); }
nvmlReturn_t nvmlShutdown(void) { if (inits) inits--; return NVML_SUCCESS; }
const char *nvmlErrorString(nvmlReturn_t error) {
    switch (error) {
        case NVML_SUCCESS: return "Success";
        case NVML_ERROR_NOT_SUPPORTED: return "Not Supported";
        case NVML_ERROR_DRIVER_NOT_LOADED: return "Driver Not Loaded";
        case NVML_ERROR_GPU_IS_LOST: return "GPU is lost";
        case NVML_ERROR_NOT_FOUND: return "Not Found";
        case NVML_ERROR_TIMEOUT: return "Timeout";
        default: return "Unknown Error";
    }
}
nvmlReturn_t nvmlSystemGetDriverVersion(char *version, unsigned length) { snprintf(version, length, "580.95.05"); return NVML_SUCCESS; }
nvmlReturn_t nvmlSystemGetNVMLVersion(char *version, unsigned length) { snprintf(version, length, "13.580.95.05"); return NVML_SUCCESS; }
nvmlReturn_t nvmlSystemGetCudaDriverVersion(int *version) { *version = 13000; return NVML_SUCCESS; }
nvmlReturn_t nvmlSystemGetCudaDriverVersion_v2(int *version) { *version = 13000; return NVML_SUCCESS; }
nvmlReturn_t nvmlDeviceGetCount_v2(unsigned *count) { *count = ng()->gpus; return NVML_SUCCESS; }
nvmlReturn_t nvmlDeviceGetHandleByIndex_v2(unsigned index, nvmlDevice_t *device) {
    if ((int)index >= ng()->gpus) return NVML_ERROR_INVALID_ARGUMENT;
    LIVE(DEVICE(index));
    *device = DEVICE(index);
    return NVML_SUCCESS;
}
nvmlReturn_t nvmlDeviceGetIndex(nvmlDevice_t device, unsigned *index) { LIVE(device); *index = OF(device)->instance < 0 ? OF(device)->gpu : OF(device)->instance; return NVML_SUCCESS; }
nvmlReturn_t nvmlDeviceGetUUID(nvmlDevice_t device, char *text, unsigned length) {
    LIVE(device);
    const unsigned char *u = (const unsigned char *)OF(device)->uuid;
    snprintf(text, length, "%s-%02x%02x%02x%02x-%02x%02x-%02x%02x-%02x%02x-%02x%02x%02x%02x%02x%02x", OF(device)->instance < 0 ? "GPU" : "MIG",
             u[0], u[1], u[2], u[3], u[4], u[5], u[6], u[7], u[8], u[9], u[10], u[11], u[12], u[13], u[14], u[15]);
    return NVML_SUCCESS;
}
nvmlReturn_t nvmlDeviceGetHandleByUUID(const char *uuid, nvmlDevice_t *device) {
    char text[96];
    for (int i = 0; i < NG_UNITS; i++) {
        if (!ng()->units[i].exists) continue;
        nvmlReturn_t answer = nvmlDeviceGetUUID(DEVICE(i), text, sizeof text);
        if (answer == NVML_SUCCESS && !strcmp(text, uuid)) { *device = DEVICE(i); return NVML_SUCCESS; }
    }
    return NVML_ERROR_NOT_FOUND;
}
nvmlReturn_t nvmlDeviceGetHandleByPciBusId_v2(const char *id, nvmlDevice_t *device) {
    int bus = 0;
    sscanf(id, "%*x:%x", &bus);
    if (bus < 16 || bus - 16 >= ng()->gpus) return NVML_ERROR_NOT_FOUND;
    LIVE(DEVICE(bus - 16));
    *device = DEVICE(bus - 16);
    return NVML_SUCCESS;
}
nvmlReturn_t nvmlDeviceGetName(nvmlDevice_t device, char *name, unsigned length) { LIVE(device); snprintf(name, length, "%s", OF(device)->name); return NVML_SUCCESS; }
static void pci(nvmlPciInfo_t *info, int bus) {
    memset(info, 0, sizeof *info);
    info->bus = bus;
    snprintf(info->busId, sizeof info->busId, "00000000:%02X:00.0", bus);
    snprintf(info->busIdLegacy, sizeof info->busIdLegacy, "0000:%02X:00.0", bus);
}
nvmlReturn_t nvmlDeviceGetPciInfo_v3(nvmlDevice_t device, nvmlPciInfo_t *info) { LIVE(device); pci(info, 16 + OF(device)->gpu); return NVML_SUCCESS; }
nvmlReturn_t nvmlDeviceGetPciInfo_v2(nvmlDevice_t device, nvmlPciInfo_t *info) { return nvmlDeviceGetPciInfo_v3(device, info); }
nvmlReturn_t nvmlDeviceGetCudaComputeCapability(nvmlDevice_t device, int *major, int *minor) { LIVE(device); *major = ng()->major, *minor = ng()->minor; return NVML_SUCCESS; }
nvmlReturn_t nvmlDeviceGetMemoryInfo(nvmlDevice_t device, nvmlMemory_t *memory) {
    LIVE(device);
    uint64_t taken = ng_used(UNIT(device)), reserved = OF(device)->reserved;
    memory->total = OF(device)->total + reserved, memory->used = taken + reserved, memory->free = OF(device)->total - taken;
    return NVML_SUCCESS;
}
nvmlReturn_t nvmlDeviceGetMemoryInfo_v2(nvmlDevice_t device, nvmlMemory_v2_t *memory) {
    LIVE(device);
    uint64_t taken = ng_used(UNIT(device)), reserved = OF(device)->reserved;
    memory->total = OF(device)->total + reserved, memory->reserved = reserved, memory->used = taken, memory->free = OF(device)->total - taken;
    return NVML_SUCCESS;
}
enum { MOST = NG_SLOTS + 2 * NG_OTHERS };
nvmlReturn_t nvmlDeviceGetComputeRunningProcesses_v3(nvmlDevice_t device, unsigned *count, nvmlProcessInfo_t *infos) {
    LIVE(device);
    pid_t pids[MOST];
    uint64_t bytes[MOST];
    int found = ng_processes(UNIT(device), pids, bytes, MOST), room = (int)*count;
    *count = found;
    if (room < found) return NVML_ERROR_INSUFFICIENT_SIZE;
    for (int i = 0; i < found; i++) {
        infos[i].pid = pids[i], infos[i].usedGpuMemory = bytes[i];
        infos[i].gpuInstanceId = infos[i].computeInstanceId = OF(device)->instance < 0 ? 0xffffffff : OF(device)->instance;
    }
    return NVML_SUCCESS;
}
nvmlReturn_t nvmlDeviceGetComputeRunningProcesses_v2(nvmlDevice_t device, unsigned *count, nvmlProcessInfo_v2_t *infos) { return nvmlDeviceGetComputeRunningProcesses_v3(device, count, (nvmlProcessInfo_t *)infos); }
nvmlReturn_t nvmlDeviceGetComputeRunningProcesses(nvmlDevice_t device, unsigned *count, nvmlProcessInfo_v1_t *infos) {
    nvmlProcessInfo_t full[MOST];
    unsigned found = MOST, room = *count;
    nvmlReturn_t answer = nvmlDeviceGetComputeRunningProcesses_v3(device, &found, full);
    if (answer) return answer;
    *count = found;
    if (room < found) return NVML_ERROR_INSUFFICIENT_SIZE;
    for (unsigned i = 0; i < found; i++) infos[i].pid = full[i].pid, infos[i].usedGpuMemory = full[i].usedGpuMemory;
    return NVML_SUCCESS;
}
nvmlReturn_t nvmlDeviceGetGraphicsRunningProcesses_v3(nvmlDevice_t device, unsigned *count, nvmlProcessInfo_t *infos) { *count = 0; return NVML_SUCCESS; }
nvmlReturn_t nvmlDeviceGetUtilizationRates(nvmlDevice_t device, nvmlUtilization_t *rates) {
    LIVE(device);
    if (OF(device)->instance >= 0) return NVML_ERROR_NOT_SUPPORTED;
    rates->gpu = ng_settings_of(UNIT(device))->utilization, rates->memory = 0;
    return NVML_SUCCESS;
}
nvmlReturn_t nvmlDeviceGetSamples(nvmlDevice_t device, nvmlSamplingType_t type, unsigned long long last, nvmlValueType_t *kind, unsigned *count, nvmlSample_t *samples) {
    LIVE(device);
    if (OF(device)->instance >= 0) return NVML_ERROR_NOT_SUPPORTED;
    struct timespec now;
    clock_gettime(CLOCK_REALTIME, &now);
    *kind = NVML_VALUE_TYPE_UNSIGNED_INT, *count = 12;
    for (int i = 0; samples && i < 12; i++) {
        samples[i].timeStamp = now.tv_sec * 1000000ull + now.tv_nsec / 1000 - (12 - i) * 166667ull;
        samples[i].sampleValue.uiVal = ng_settings_of(UNIT(device))->utilization;
    }
    return NVML_SUCCESS;
}
nvmlReturn_t nvmlDeviceGetComputeMode(nvmlDevice_t device, nvmlComputeMode_t *mode) { *mode = NVML_COMPUTEMODE_DEFAULT; return NVML_SUCCESS; }
nvmlReturn_t nvmlDeviceGetRemappedRows(nvmlDevice_t device, unsigned *a, unsigned *b, unsigned *pending, unsigned *failed) {
    LIVE(device);
    *a = *b = *pending = 0, *failed = ng_settings_of(UNIT(device))->remap_failed;
    return NVML_SUCCESS;
}

/* -- MIG -------------------------------------------------------------------------------------------------------------------------- */
nvmlReturn_t nvmlDeviceGetMigMode(nvmlDevice_t device, unsigned *now, unsigned *pending) { LIVE(device); *now = *pending = OF(device)->instances >= 0 && OF(device)->instance < 0; return NVML_SUCCESS; }
nvmlReturn_t nvmlDeviceGetMaxMigDeviceCount(nvmlDevice_t device, unsigned *count) { LIVE(device); *count = OF(device)->instances >= 0 ? NG_INSTANCES : 0; return NVML_SUCCESS; }
nvmlReturn_t nvmlDeviceGetMigDeviceHandleByIndex(nvmlDevice_t device, unsigned index, nvmlDevice_t *instance) {
    LIVE(device);
    if ((int)index >= OF(device)->instances) return NVML_ERROR_NOT_FOUND;
    *instance = DEVICE(NG_GPUS + OF(device)->gpu * NG_INSTANCES + index);
    return NVML_SUCCESS;
}
nvmlReturn_t nvmlDeviceIsMigDeviceHandle(nvmlDevice_t device, unsigned *is) { *is = OF(device)->instance >= 0; return NVML_SUCCESS; }
nvmlReturn_t nvmlDeviceGetDeviceHandleFromMigDeviceHandle(nvmlDevice_t instance, nvmlDevice_t *device) { *device = DEVICE(OF(instance)->gpu); return NVML_SUCCESS; }
nvmlReturn_t nvmlDeviceGetGpuInstanceId(nvmlDevice_t device, unsigned *id) { if (OF(device)->instance < 0) return NVML_ERROR_INVALID_ARGUMENT; *id = OF(device)->instance; return NVML_SUCCESS; }
nvmlReturn_t nvmlDeviceGetComputeInstanceId(nvmlDevice_t device, unsigned *id) { if (OF(device)->instance < 0) return NVML_ERROR_INVALID_ARGUMENT; *id = 0; return NVML_SUCCESS; }

/* -- links ------------------------------------------------------------------------------------------------------------------------ */
static int nvlinks(void) { return ng()->link == NG_NVSWITCH || (ng()->link == NG_NVLINK && ng()->gpus > 1) ? 18 : 0; }
nvmlReturn_t nvmlDeviceGetP2PStatus(nvmlDevice_t a, nvmlDevice_t b, nvmlGpuP2PCapsIndex_t what, nvmlGpuP2PStatus_t *status) {
    LIVE(a);
    LIVE(b);
    if (UNIT(a) >= NG_GPUS || UNIT(b) >= NG_GPUS) return NVML_ERROR_NOT_SUPPORTED;
    int works = what == NVML_P2P_CAPS_INDEX_NVLINK ? nvlinks() > 0 : ng_peers(UNIT(a), UNIT(b));
    *status = works ? NVML_P2P_STATUS_OK : NVML_P2P_STATUS_NOT_SUPPORTED;
    return NVML_SUCCESS;
}
nvmlReturn_t nvmlDeviceGetTopologyCommonAncestor(nvmlDevice_t a, nvmlDevice_t b, nvmlGpuTopologyLevel_t *level) {
    LIVE(a);
    *level = ng()->link == NG_HOST_ONLY ? NVML_TOPOLOGY_SYSTEM : ng()->link == NG_PCIE || ng()->link == NG_P2P ? NVML_TOPOLOGY_HOSTBRIDGE : NVML_TOPOLOGY_NODE;
    return NVML_SUCCESS;
}
nvmlReturn_t nvmlDeviceGetNvLinkState(nvmlDevice_t device, unsigned link, nvmlEnableState_t *state) {
    LIVE(device);
    if (!nvlinks()) return NVML_ERROR_NOT_SUPPORTED;
    if ((int)link >= nvlinks()) return NVML_ERROR_INVALID_ARGUMENT;
    *state = NVML_FEATURE_ENABLED;
    return NVML_SUCCESS;
}
nvmlReturn_t nvmlDeviceGetNvLinkVersion(nvmlDevice_t device, unsigned link, unsigned *version) { LIVE(device); *version = 6; return NVML_SUCCESS; }
nvmlReturn_t nvmlDeviceGetNvLinkRemotePciInfo_v2(nvmlDevice_t device, unsigned link, nvmlPciInfo_t *info) {
    LIVE(device);
    if (!nvlinks()) return NVML_ERROR_NOT_SUPPORTED;
    int own = OF(device)->gpu, other = ng()->gpus > 1 ? (int)link % (ng()->gpus - 1) : 0; /* to the others in turn, or to four switches */
    pci(info, ng()->link == NG_NVSWITCH ? 200 + (int)link % 4 : 16 + other + (other >= own));
    return NVML_SUCCESS;
}
nvmlReturn_t nvmlDeviceGetNvLinkRemoteDeviceType(nvmlDevice_t device, unsigned link, nvmlIntNvLinkDeviceType_t *type) {
    LIVE(device);
    *type = ng()->link == NG_NVSWITCH ? NVML_NVLINK_DEVICE_TYPE_SWITCH : NVML_NVLINK_DEVICE_TYPE_GPU;
    return NVML_SUCCESS;
}
nvmlReturn_t nvmlDeviceGetMaxPcieLinkGeneration(nvmlDevice_t device, unsigned *generation) { *generation = 5; return NVML_SUCCESS; }
nvmlReturn_t nvmlDeviceGetMaxPcieLinkWidth(nvmlDevice_t device, unsigned *width) { *width = 16; return NVML_SUCCESS; }
nvmlReturn_t nvmlDeviceGetTemperature(nvmlDevice_t device, nvmlTemperatureSensors_t sensor, unsigned *degrees) { *degrees = 40; return NVML_SUCCESS; }
nvmlReturn_t nvmlDeviceGetPowerUsage(nvmlDevice_t device, unsigned *milliwatts) { *milliwatts = 90000; return NVML_SUCCESS; }
nvmlReturn_t nvmlDeviceGetClockInfo(nvmlDevice_t device, nvmlClockType_t type, unsigned *mhz) { *mhz = 1980; return NVML_SUCCESS; }
nvmlReturn_t nvmlDeviceGetMaxClockInfo(nvmlDevice_t device, nvmlClockType_t type, unsigned *mhz) { *mhz = 1980; return NVML_SUCCESS; }
nvmlReturn_t nvmlEventSetCreate(nvmlEventSet_t *set) { *set = (nvmlEventSet_t)&inits; return NVML_SUCCESS; }
nvmlReturn_t nvmlDeviceGetSupportedEventTypes(nvmlDevice_t device, unsigned long long *types) { *types = nvmlEventTypeXidCriticalError | nvmlEventTypeDoubleBitEccError; return NVML_SUCCESS; }
nvmlReturn_t nvmlDeviceRegisterEvents(nvmlDevice_t device, unsigned long long types, nvmlEventSet_t set) { return NVML_SUCCESS; }
nvmlReturn_t nvmlEventSetWait_v2(nvmlEventSet_t set, nvmlEventData_t *data, unsigned milliseconds) { usleep(1000 * milliseconds); return NVML_ERROR_TIMEOUT; }
nvmlReturn_t nvmlEventSetFree(nvmlEventSet_t set) { return NVML_SUCCESS; }
nvmlReturn_t nvmlDeviceGetFieldValues(nvmlDevice_t device, int count, nvmlFieldValue_t *values) {
    LIVE(device);
    for (int i = 0; i < count; i++) {
        values[i].nvmlReturn = NVML_ERROR_NOT_SUPPORTED;
#ifdef NVML_FI_DEV_GET_GPU_RECOVERY_ACTION
        if (values[i].fieldId != NVML_FI_DEV_GET_GPU_RECOVERY_ACTION) continue;
        values[i].nvmlReturn = NVML_SUCCESS, values[i].valueType = NVML_VALUE_TYPE_UNSIGNED_INT;
        values[i].value.uiVal = ng_settings_of(UNIT(device))->recovery;
#endif
    }
    return NVML_SUCCESS;
}
nvmlReturn_t nvmlDeviceGetGpuFabricInfoV(nvmlDevice_t device, nvmlGpuFabricInfoV_t *info) { info->state = NVML_GPU_FABRIC_STATE_NOT_SUPPORTED; info->status = NVML_SUCCESS; return NVML_SUCCESS; }
