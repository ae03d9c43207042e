/* The CUDA driver: contexts, memory that is mapped piece by piece (expandable segments), and nothing of kernels. Asked for by name. */
#define _GNU_SOURCE
#include "nullgpu.h"
#include <cuda.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>
int cudaMalloc(void **, size_t);
int cudaFree(void *);
int cudaDeviceGetAttribute(int *, int, int);

typedef struct { size_t bytes; int device, maps, released; } piece_t; /* cuMemCreate's */
typedef struct { char *at; size_t bytes; piece_t *piece; } map_t;
static map_t *maps;
static int map_count, map_room;
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static char context_of[NG_GPUS];

CUresult cuInit(unsigned flags) { return ng_devices()->count ? CUDA_SUCCESS : CUDA_ERROR_NO_DEVICE; }
CUresult cuDriverGetVersion(int *version) { *version = CUDA_VERSION; return CUDA_SUCCESS; }
CUresult cuDeviceGetCount(int *count) { *count = ng()->count; return CUDA_SUCCESS; }
CUresult cuDeviceGet(CUdevice *device, int ordinal) { if (ordinal >= ng()->count) return CUDA_ERROR_INVALID_DEVICE; *device = ordinal; return CUDA_SUCCESS; }
CUresult cuDeviceGetName(char *name, int length, CUdevice device) { snprintf(name, length, "%s", ng_of(device)->name); return CUDA_SUCCESS; }
CUresult cuDeviceGetUuid_v2(CUuuid *uuid, CUdevice device) { memcpy(uuid, ng_of(device)->uuid, 16); return CUDA_SUCCESS; }
#undef cuDeviceGetUuid
CUresult cuDeviceGetUuid(CUuuid *uuid, CUdevice device) { return cuDeviceGetUuid_v2(uuid, device); }
CUresult cuDeviceTotalMem_v2(size_t *bytes, CUdevice device) { *bytes = ng_of(device)->total; return CUDA_SUCCESS; }
CUresult cuDeviceComputeCapability(int *major, int *minor, CUdevice device) { *major = ng()->major, *minor = ng()->minor; return CUDA_SUCCESS; }
CUresult cuDeviceGetAttribute(int *value, CUdevice_attribute attribute, CUdevice device) {
    switch ((int)attribute) {
        case CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED: *value = 1; return CUDA_SUCCESS;
        case CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED: case CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_FABRIC_SUPPORTED:
        case CU_DEVICE_ATTRIBUTE_MULTICAST_SUPPORTED: *value = 0; return CUDA_SUCCESS;
    }
    return cudaDeviceGetAttribute(value, attribute, device);
}
CUresult cuDevicePrimaryCtxGetState(CUdevice device, unsigned *flags, int *active) { *flags = 0; *active = ng_has_context(device); return CUDA_SUCCESS; }
CUresult cuDevicePrimaryCtxRetain(CUcontext *context, CUdevice device) { ng_context(device); *context = (CUcontext)&context_of[device]; return CUDA_SUCCESS; }
CUresult cuDevicePrimaryCtxRelease_v2(CUdevice device) { return CUDA_SUCCESS; }
CUresult cuCtxGetCurrent(CUcontext *context) { *context = ng_has_context(ng_current) ? (CUcontext)&context_of[ng_current] : NULL; return CUDA_SUCCESS; }
CUresult cuCtxSetCurrent(CUcontext context) { if (context) ng_current = (int)((char *)context - context_of); return CUDA_SUCCESS; }
CUresult cuCtxPushCurrent_v2(CUcontext context) { return cuCtxSetCurrent(context); }
CUresult cuCtxPopCurrent_v2(CUcontext *context) { return context ? cuCtxGetCurrent(context) : CUDA_SUCCESS; }
CUresult cuCtxGetDevice(CUdevice *device) { *device = ng_current; return CUDA_SUCCESS; }
CUresult cuGetErrorString(CUresult error, const char **text) { *text = error == CUDA_ERROR_OUT_OF_MEMORY ? "out of memory" : error ? "unknown error" : "no error"; return CUDA_SUCCESS; }
CUresult cuGetErrorName(CUresult error, const char **text) { *text = error == CUDA_ERROR_OUT_OF_MEMORY ? "CUDA_ERROR_OUT_OF_MEMORY" : error ? "CUDA_ERROR_UNKNOWN" : "CUDA_SUCCESS"; return CUDA_SUCCESS; }
CUresult cuMemGetInfo_v2(size_t *free_bytes, size_t *total) { *total = ng_of(ng_current)->total; *free_bytes = *total - ng_used(ng()->visible[ng_current]); return CUDA_SUCCESS; }
CUresult cuMemAlloc_v2(CUdeviceptr *pointer, size_t bytes) { return cudaMalloc((void **)pointer, bytes) ? CUDA_ERROR_OUT_OF_MEMORY : CUDA_SUCCESS; }
CUresult cuMemFree_v2(CUdeviceptr pointer) { cudaFree((void *)pointer); return CUDA_SUCCESS; }
CUresult cuMemGetAddressRange_v2(CUdeviceptr *base, size_t *size, CUdeviceptr pointer) {
    void *start = NULL;
    size_t bytes = 0;
    if (!ng_find((void *)pointer, &start, &bytes, NULL)) return CUDA_ERROR_NOT_FOUND;
    if (base) *base = (CUdeviceptr)start;
    if (size) *size = bytes;
    return CUDA_SUCCESS;
}
#undef cuMemGetAddressRange
CUresult cuMemGetAddressRange(CUdeviceptr *base, size_t *size, CUdeviceptr pointer) { return cuMemGetAddressRange_v2(base, size, pointer); }
CUresult cuPointerGetAttribute(void *value, CUpointer_attribute attribute, CUdeviceptr pointer) {
    int device = 0, kind = ng_find((void *)pointer, NULL, NULL, &device);
    switch ((int)attribute) {
        case CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL: *(int *)value = device; break;
        case CU_POINTER_ATTRIBUTE_MEMORY_TYPE: *(int *)value = kind == NG_DEVICE ? CU_MEMORYTYPE_DEVICE : CU_MEMORYTYPE_HOST; break;
        case CU_POINTER_ATTRIBUTE_CONTEXT: *(void **)value = &context_of[device]; break;
        case CU_POINTER_ATTRIBUTE_BUFFER_ID: *(uint64_t *)value = pointer >> 9; break;
        default: *(int *)value = 0;
    }
    return kind ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}
CUresult cuMemsetD32Async(CUdeviceptr pointer, unsigned value, size_t count, CUstream stream) { ng_drain(stream); for (size_t i = 0; i < count; i++) ((unsigned *)pointer)[i] = value; return CUDA_SUCCESS; }
CUresult cuStreamWriteValue32(CUstream stream, CUdeviceptr pointer, cuuint32_t value, unsigned flags) { ng_drain(stream); *(uint32_t *)pointer = value; return CUDA_SUCCESS; }

CUresult cuMemGetAllocationGranularity(size_t *bytes, const CUmemAllocationProp *prop, CUmemAllocationGranularity_flags option) { *bytes = 2u << 20; return CUDA_SUCCESS; }
CUresult cuMemAddressReserve(CUdeviceptr *pointer, size_t bytes, size_t alignment, CUdeviceptr wanted, unsigned long long flags) {
    size_t align = 2u << 20;
    char *got = mmap(NULL, bytes + align, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (got == MAP_FAILED) return CUDA_ERROR_OUT_OF_MEMORY;
    char *start = (char *)(((uintptr_t)got + align - 1) & ~(uintptr_t)(align - 1));
    if (start > got) munmap(got, start - got);
    if (start + bytes < got + bytes + align) munmap(start + bytes, got + align - start);
    *pointer = (CUdeviceptr)start;
    return CUDA_SUCCESS;
}
CUresult cuMemAddressFree(CUdeviceptr pointer, size_t bytes) { munmap((void *)pointer, bytes); return CUDA_SUCCESS; }
CUresult cuMemCreate(CUmemGenericAllocationHandle *handle, size_t bytes, const CUmemAllocationProp *prop, unsigned long long flags) {
    int device = prop->location.type == CU_MEM_LOCATION_TYPE_DEVICE ? prop->location.id : -1;
    ng_count(NG_MALLOCS);
    if (device >= 0 && !ng_take(device, bytes)) return CUDA_ERROR_OUT_OF_MEMORY;
    piece_t *piece = calloc(1, sizeof *piece);
    *piece = (piece_t){bytes, device, 0, 0};
    *handle = (CUmemGenericAllocationHandle)piece;
    return CUDA_SUCCESS;
}
static void dropped(piece_t *piece) { if (piece->released && !piece->maps) { if (piece->device >= 0) ng_give(piece->device, piece->bytes); free(piece); } }
CUresult cuMemRelease(CUmemGenericAllocationHandle handle) {
    pthread_mutex_lock(&lock);
    ((piece_t *)handle)->released = 1;
    dropped((piece_t *)handle);
    pthread_mutex_unlock(&lock);
    return CUDA_SUCCESS;
}
CUresult cuMemMap(CUdeviceptr pointer, size_t bytes, size_t offset, CUmemGenericAllocationHandle handle, unsigned long long flags) {
    piece_t *piece = (piece_t *)handle;
    pthread_mutex_lock(&lock);
    if (map_count == map_room) maps = realloc(maps, (map_room = map_room ? 2 * map_room : 256) * sizeof *maps);
    maps[map_count++] = (map_t){(char *)pointer, bytes, piece};
    piece->maps++;
    pthread_mutex_unlock(&lock);
    mprotect((void *)pointer, bytes, PROT_READ | PROT_WRITE);
    ng_note((void *)pointer, bytes, piece->device >= 0 ? NG_DEVICE : NG_HOST, piece->device);
    return CUDA_SUCCESS;
}
CUresult cuMemSetAccess(CUdeviceptr pointer, size_t bytes, const CUmemAccessDesc *access, size_t count) { return CUDA_SUCCESS; }
CUresult cuMemUnmap(CUdeviceptr pointer, size_t bytes) {
    ng_drain_all();
    pthread_mutex_lock(&lock);
    for (int i = 0; i < map_count;) {
        if (maps[i].at >= (char *)pointer && maps[i].at < (char *)pointer + bytes) {
            ng_forget(maps[i].at, NULL, NULL);
            maps[i].piece->maps--;
            dropped(maps[i].piece);
            maps[i] = maps[--map_count];
        } else i++;
    }
    pthread_mutex_unlock(&lock);
    madvise((void *)pointer, bytes, MADV_DONTNEED);
    mprotect((void *)pointer, bytes, PROT_NONE);
    return CUDA_SUCCESS;
}
CUresult cuMemExportToShareableHandle(void *a, CUmemGenericAllocationHandle b, CUmemAllocationHandleType c, unsigned long long d) { return CUDA_ERROR_NOT_SUPPORTED; }
CUresult cuMemImportFromShareableHandle(CUmemGenericAllocationHandle *a, void *b, CUmemAllocationHandleType c) { return CUDA_ERROR_NOT_SUPPORTED; }
CUresult cuMulticastCreate(CUmemGenericAllocationHandle *a, const CUmulticastObjectProp *b) { return CUDA_ERROR_NOT_SUPPORTED; }
CUresult cuModuleLoadData(CUmodule *module, const void *image) { *module = (CUmodule)context_of; return CUDA_SUCCESS; }
CUresult cuModuleLoadDataEx(CUmodule *module, const void *image, unsigned n, CUjit_option *o, void **v) { *module = (CUmodule)context_of; return CUDA_SUCCESS; }
CUresult cuModuleGetFunction(CUfunction *function, CUmodule module, const char *name) { *function = (CUfunction)context_of; return CUDA_SUCCESS; }
CUresult cuOccupancyMaxActiveBlocksPerMultiprocessor(int *blocks, CUfunction function, int size, size_t bytes) { *blocks = 2048 / (size > 0 ? size : 1); return CUDA_SUCCESS; }
CUresult cuFuncGetAttribute(int *value, CUfunction_attribute attribute, CUfunction function) { *value = attribute == CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK ? 1024 : 0; return CUDA_SUCCESS; }
