/* The CUDA runtime: memory is the host's, streams and events are done at once, kernels do nothing. */
#define _GNU_SOURCE
#include "nullgpu.h"
#include <cuda_runtime_api.h>
#include <dlfcn.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#define OK cudaSuccess
static __thread cudaError_t last = cudaSuccess;
static cudaError_t failed(cudaError_t error) { return last = error; }
/* A device that is lost: every call says so, now and from then on. */
static cudaError_t alive(void) { int error = ng_error(ng_current); return error ? failed((cudaError_t)error) : OK; }
#define ALIVE() do { cudaError_t gone = alive(); if (gone) return gone; } while (0)
#define IN_RANGE(d) if ((d) < 0 || (d) >= ng()->count) return failed(ng()->count ? cudaErrorInvalidDevice : cudaErrorNoDevice)

typedef struct stream_t { int device, priority; unsigned flags; ng_job *tail; struct stream_t *next; } stream_t;
typedef struct { int device; unsigned flags; int recorded; double at; ng_job *job; } event_t;
static double now(void) { struct timespec t; clock_gettime(CLOCK_MONOTONIC, &t); return t.tv_sec * 1e3 + t.tv_nsec * 1e-6; }

/* -- jobs ------------------------------------------------------------------------------------------------------------------ */
static pthread_mutex_t job_lock = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t job_done = PTHREAD_COND_INITIALIZER;
static stream_t defaults[NG_GPUS], *streams;
static stream_t *of(void *stream) { return (uintptr_t)stream > 2 ? stream : &defaults[ng_current]; }
static int done(ng_job *job) { /* under the lock; jobs are few and small, and never freed */
    if (!job || job->done) return 1;
    if (!job->first || !done(job->first) || !done(job->second)) return 0;
    job->at = job->first->at > job->second->at ? job->first->at : job->second->at;
    return job->done = 1;
}
static void await(ng_job *job) { /* what runs on a device that is lost is never done, and nobody waits for it */
    while (!done(job) && !ng_error(ng_current)) {
        struct timespec until;
        clock_gettime(CLOCK_REALTIME, &until);
        until.tv_nsec += 50000000;
        if (until.tv_nsec >= 1000000000) until.tv_sec++, until.tv_nsec -= 1000000000;
        pthread_cond_timedwait(&job_done, &job_lock, &until);
    }
}
#define LOCKED(what) do { pthread_mutex_lock(&job_lock); what; pthread_mutex_unlock(&job_lock); } while (0)
int ng_job_done(ng_job *job) { int found; LOCKED(found = done(job)); return found; }
void ng_job_wait(ng_job *job) { LOCKED(await(job)); }
void ng_job_finish(ng_job *job) { LOCKED(job->at = now(); job->done = 1; pthread_cond_broadcast(&job_done)); }
static ng_job *joint(ng_job *a, ng_job *b) {
    if (done(a) || a == b) return done(b) ? NULL : b;
    if (done(b)) return a;
    ng_job *made = calloc(1, sizeof *made);
    made->first = a, made->second = b;
    return made;
}
ng_job *ng_enqueue(void *stream) { /* the worker waits for what the stream waits for: it is put behind it */
    ng_job *job = calloc(1, sizeof *job);
    LOCKED(job->after = of(stream)->tail; of(stream)->tail = job);
    return job;
}
void ng_drain(void *stream) { LOCKED(await(of(stream)->tail); of(stream)->tail = NULL); }
void ng_drain_all(void) {
    LOCKED(for (stream_t *s = streams; s; s = s->next) await(s->tail); for (int i = 0; i < NG_GPUS; i++) await(defaults[i].tail));
}

/* -- devices ------------------------------------------------------------------------------------------------------------- */
cudaError_t cudaGetDeviceCount(int *count) { *count = ng_devices()->count; return *count ? OK : failed(cudaErrorNoDevice); }
cudaError_t cudaSetDevice(int device) { ng_devices(); IN_RANGE(device); ng_current = device; ng_context(device); return alive(); }
cudaError_t cudaGetDevice(int *device) { if (!ng()->count) return failed(cudaErrorNoDevice); *device = ng_current; return OK; }
cudaError_t cudaDeviceSynchronize(void) { ng_count(NG_DEVICE_SYNCS); ng_drain_all(); return alive(); }
cudaError_t cudaDeviceReset(void) { return OK; }
cudaError_t cudaDriverGetVersion(int *version) { *version = ng()->gpus ? CUDART_VERSION : 0; return OK; }
cudaError_t cudaRuntimeGetVersion(int *version) { *version = CUDART_VERSION; return OK; }
cudaError_t cudaDeviceGetStreamPriorityRange(int *least, int *greatest) { *least = 0; *greatest = -5; return OK; }
cudaError_t cudaDeviceGetPCIBusId(char *id, int length, int device) {
    IN_RANGE(device);
    snprintf(id, length, "0000:%02X:00.0", 16 + ng_of(device)->gpu);
    return OK;
}
cudaError_t cudaDeviceGetByPCIBusId(int *device, const char *id) {
    int bus = 0;
    sscanf(id, "%*x:%x", &bus);
    for (int i = 0; i < ng()->count; i++) if (ng_of(i)->gpu == bus - 16) { *device = i; return OK; }
    return failed(cudaErrorInvalidDevice);
}
cudaError_t cudaDeviceCanAccessPeer(int *can, int device, int peer) { IN_RANGE(device); IN_RANGE(peer); *can = ng_peers(ng()->visible[device], ng()->visible[peer]); return OK; }
cudaError_t cudaDeviceEnablePeerAccess(int peer, unsigned flags) { return OK; }
cudaError_t cudaMemGetInfo(size_t *free_bytes, size_t *total) {
    if (!ng()->count) return failed(cudaErrorNoDevice);
    ng_context(ng_current);
    ALIVE();
    *total = ng_of(ng_current)->total;
    *free_bytes = *total - ng_used(ng()->visible[ng_current]);
    return OK;
}
cudaError_t cudaGetDeviceProperties(struct cudaDeviceProp *p, int device) {
    IN_RANGE(device);
    memset(p, 0, sizeof *p);
    snprintf(p->name, sizeof p->name, "%s", ng_of(device)->name);
    memcpy(&p->uuid, ng_of(device)->uuid, 16);
    p->totalGlobalMem = ng_of(device)->total;
    p->sharedMemPerBlock = 49152;
    p->sharedMemPerMultiprocessor = 233472;
    p->sharedMemPerBlockOptin = 232448;
    p->reservedSharedMemPerBlock = 1024;
    p->regsPerBlock = p->regsPerMultiprocessor = 65536;
    p->warpSize = 32;
    p->maxThreadsPerBlock = 1024;
    p->maxThreadsDim[0] = p->maxThreadsDim[1] = 1024, p->maxThreadsDim[2] = 64;
    p->maxGridSize[0] = 2147483647, p->maxGridSize[1] = p->maxGridSize[2] = 65535;
    p->totalConstMem = 65536;
    p->major = ng()->major, p->minor = ng()->minor;
    p->textureAlignment = 512, p->texturePitchAlignment = 32, p->memPitch = 2147483647;
    p->multiProcessorCount = ng_of(device)->sms;
    p->canMapHostMemory = p->concurrentKernels = p->ECCEnabled = p->unifiedAddressing = 1;
    p->pciBusID = 16 + ng_of(device)->gpu;
    p->asyncEngineCount = 3;
    p->memoryBusWidth = 5120;
    p->l2CacheSize = 52428800;
    p->maxThreadsPerMultiProcessor = ng()->sm_threads;
    p->maxBlocksPerMultiProcessor = 32;
    p->streamPrioritiesSupported = p->globalL1CacheSupported = p->localL1CacheSupported = 1;
    p->managedMemory = p->concurrentManagedAccess = p->computePreemptionSupported = p->cooperativeLaunch = 1;
    p->hostRegisterSupported = p->memoryPoolsSupported = p->ipcEventSupported = p->clusterLaunch = p->unifiedFunctionPointers = 1;
    return OK;
}
cudaError_t cudaDeviceGetAttribute(int *value, enum cudaDeviceAttr attribute, int device) {
    struct cudaDeviceProp p;
    cudaError_t error = cudaGetDeviceProperties(&p, device);
    if (error) return error;
    switch ((int)attribute) {
        case cudaDevAttrMaxThreadsPerBlock: *value = 1024; break;
        case cudaDevAttrMaxBlockDimX: case cudaDevAttrMaxBlockDimY: *value = 1024; break;
        case cudaDevAttrMaxBlockDimZ: *value = 64; break;
        case cudaDevAttrMaxGridDimX: *value = 2147483647; break;
        case cudaDevAttrMaxGridDimY: case cudaDevAttrMaxGridDimZ: *value = 65535; break;
        case cudaDevAttrMaxSharedMemoryPerBlock: *value = (int)p.sharedMemPerBlock; break;
        case cudaDevAttrMaxSharedMemoryPerBlockOptin: *value = (int)p.sharedMemPerBlockOptin; break;
        case cudaDevAttrMaxSharedMemoryPerMultiprocessor: *value = (int)p.sharedMemPerMultiprocessor; break;
        case cudaDevAttrReservedSharedMemoryPerBlock: *value = (int)p.reservedSharedMemPerBlock; break;
        case cudaDevAttrMaxRegistersPerBlock: case cudaDevAttrMaxRegistersPerMultiprocessor: *value = 65536; break;
        case cudaDevAttrMaxThreadsPerMultiProcessor: *value = p.maxThreadsPerMultiProcessor; break;
        case cudaDevAttrMaxBlocksPerMultiprocessor: *value = 32; break;
        case cudaDevAttrMultiProcessorCount: *value = p.multiProcessorCount; break;
        case cudaDevAttrWarpSize: *value = 32; break;
        case cudaDevAttrComputeCapabilityMajor: *value = p.major; break;
        case cudaDevAttrComputeCapabilityMinor: *value = p.minor; break;
        case cudaDevAttrClockRate: *value = 1980000; break;
        case cudaDevAttrMemoryClockRate: *value = 2619000; break;
        case cudaDevAttrGlobalMemoryBusWidth: *value = p.memoryBusWidth; break;
        case cudaDevAttrL2CacheSize: *value = p.l2CacheSize; break;
        case cudaDevAttrTotalConstantMemory: *value = 65536; break;
        case cudaDevAttrTextureAlignment: *value = 512; break;
        case cudaDevAttrPciBusId: *value = p.pciBusID; break;
        case cudaDevAttrPciDeviceId: case cudaDevAttrPciDomainId: case cudaDevAttrIntegrated: case cudaDevAttrComputeMode: *value = 0; break;
        case cudaDevAttrUnifiedAddressing: case cudaDevAttrConcurrentKernels: case cudaDevAttrCooperativeLaunch: case cudaDevAttrEccEnabled:
        case cudaDevAttrMemoryPoolsSupported: case cudaDevAttrHostRegisterSupported: case cudaDevAttrCanMapHostMemory: *value = 1; break;
        default: *value = 0;
    }
    return OK;
}

/* -- memory -------------------------------------------------------------------------------------------------------------- */
static size_t whole(size_t bytes) { /* the driver hands out memory in pieces of 2 MiB, cudaMalloc's small ones share such a piece */
    return (bytes + 511) & ~(size_t)511;
}
cudaError_t cudaMalloc(void **pointer, size_t bytes) {
    *pointer = NULL;
    if (!ng()->count) return failed(cudaErrorNoDevice);
    if (!bytes) return OK;
    size_t size = whole(bytes);
    ng_count(NG_MALLOCS);
    ALIVE();
    if (!ng_take(ng_current, size)) return failed(cudaErrorMemoryAllocation);
    /* Two MiB more than asked, to align as the driver does; pages that nothing writes to take no memory. */
    size_t room = size + (2u << 20);
    char *got = mmap(NULL, room, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (got == MAP_FAILED) { ng_give(ng_current, size); return failed(cudaErrorMemoryAllocation); }
    char *start = (char *)(((uintptr_t)got + (2u << 20) - 1) & ~(uintptr_t)((2u << 20) - 1));
    if (start > got) munmap(got, start - got);
    size_t page = (size + 4095) & ~(size_t)4095;
    if (start + page < got + room) munmap(start + page, got + room - start - page);
    ng_note(start, size, NG_DEVICE, ng_current);
    *pointer = start;
    return OK;
}
cudaError_t cudaFree(void *pointer) {
    int kind = 0, device = 0;
    if (ng()->count) ng_context(ng_current);
    if (!pointer) return OK;
    ng_count(NG_FREES);
    ng_drain_all();
    size_t bytes = ng_forget(pointer, &kind, &device);
    if (!bytes) return failed(cudaErrorInvalidValue);
    munmap(pointer, (bytes + 4095) & ~(size_t)4095);
    ng_give(device, bytes);
    return OK;
}
cudaError_t cudaMallocAsync(void **pointer, size_t bytes, cudaStream_t stream) { return cudaMalloc(pointer, bytes); }
cudaError_t cudaMallocFromPoolAsync(void **pointer, size_t bytes, cudaMemPool_t pool, cudaStream_t stream) { return cudaMalloc(pointer, bytes); }
cudaError_t cudaFreeAsync(void *pointer, cudaStream_t stream) { return cudaFree(pointer); }
cudaError_t cudaMallocManaged(void **pointer, size_t bytes, unsigned flags) { return cudaMalloc(pointer, bytes); }
cudaError_t cudaDeviceGetDefaultMemPool(cudaMemPool_t *pool, int device) { *pool = (cudaMemPool_t)(uintptr_t)(device + 1); return OK; }
cudaError_t cudaMemPoolGetAttribute(cudaMemPool_t pool, enum cudaMemPoolAttr attribute, void *value) { *(uint64_t *)value = 0; return OK; }
cudaError_t cudaHostAlloc(void **pointer, size_t bytes, unsigned flags) {
    ng_count(NG_HOST_MALLOCS);
    if (!ng()->count) return failed(cudaErrorNoDevice);
    ng_context(ng_current);
    *pointer = mmap(NULL, (bytes + 4095) & ~(size_t)4095, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (*pointer == MAP_FAILED) return failed(cudaErrorMemoryAllocation);
    ng_note(*pointer, (bytes + 4095) & ~(size_t)4095, NG_HOST, ng_current);
    return OK;
}
cudaError_t cudaMallocHost(void **pointer, size_t bytes) { return cudaHostAlloc(pointer, bytes, 0); }
cudaError_t cudaFreeHost(void *pointer) {
    size_t bytes = pointer ? ng_forget(pointer, NULL, NULL) : 0;
    if (bytes) munmap(pointer, bytes);
    return OK;
}
cudaError_t cudaHostRegister(void *pointer, size_t bytes, unsigned flags) { ng_note(pointer, bytes, NG_REGISTERED, ng_current); return OK; }
cudaError_t cudaHostUnregister(void *pointer) { ng_forget(pointer, NULL, NULL); return OK; }
cudaError_t cudaHostGetDevicePointer(void **device, void *host, unsigned flags) { *device = host; return OK; }
cudaError_t cudaPointerGetAttributes(struct cudaPointerAttributes *attributes, const void *pointer) {
    int device = ng_current, kind = ng_find(pointer, NULL, NULL, &device);
    memset(attributes, 0, sizeof *attributes);
    attributes->device = device;
    attributes->type = kind == NG_DEVICE ? cudaMemoryTypeDevice : kind ? cudaMemoryTypeHost : cudaMemoryTypeUnregistered;
    attributes->devicePointer = kind ? (void *)pointer : NULL;
    attributes->hostPointer = kind && kind != NG_DEVICE ? (void *)pointer : NULL;
    return OK;
}
static int pageable(const void *pointer) { return !ng_find(pointer, NULL, NULL, NULL); }
/* From or to memory that isn't pinned the host waits, whatever the call is named: all of the way to it, and for a part of the way from it. */
static void copies(const void *to, const void *from) {
    ng_count(NG_COPIES);
    if (pageable(to) || pageable(from)) ng_count(NG_PAGEABLE_COPIES);
}
cudaError_t cudaMemcpy(void *to, const void *from, size_t bytes, enum cudaMemcpyKind kind) {
    ng_count(NG_COPIES);
    ng_count(NG_BLOCKING_COPIES);
    ng_drain(NULL);
    ALIVE();
    ng_copy(to, from, bytes);
    return OK;
}
cudaError_t cudaMemcpyAsync(void *to, const void *from, size_t bytes, enum cudaMemcpyKind kind, cudaStream_t stream) {
    copies(to, from);
    ng_drain(stream);
    ALIVE();
    ng_copy(to, from, bytes);
    return OK;
}
cudaError_t cudaMemcpyPeerAsync(void *to, int a, const void *from, int b, size_t bytes, cudaStream_t stream) {
    return cudaMemcpyAsync(to, from, bytes, cudaMemcpyDefault, stream);
}
cudaError_t cudaMemcpy2DAsync(void *to, size_t to_pitch, const void *from, size_t from_pitch, size_t width, size_t height, enum cudaMemcpyKind kind, cudaStream_t stream) {
    copies(to, from);
    ng_drain(stream);
    for (size_t row = 0; row < height; row++) ng_copy((char *)to + row * to_pitch, (const char *)from + row * from_pitch, width);
    return OK;
}
cudaError_t cudaMemset(void *pointer, int value, size_t bytes) { ALIVE(); if (value) memset(pointer, value, bytes); else ng_zero(pointer, bytes); return OK; }
cudaError_t cudaMemsetAsync(void *pointer, int value, size_t bytes, cudaStream_t stream) { ng_drain(stream); return cudaMemset(pointer, value, bytes); }

/* An allocation that another process opens becomes a file then: its bytes move to one, mapped where they were. */
cudaError_t cudaIpcGetMemHandle(cudaIpcMemHandle_t *handle, void *pointer) {
    void *start; size_t bytes; int device;
    if (ng_find(pointer, &start, &bytes, &device) != NG_DEVICE) return failed(cudaErrorInvalidValue);
    char path[64];
    size_t page = (bytes + 4095) & ~(size_t)4095;
    snprintf(path, sizeof path, "/dev/shm/nullgpu.%d.%lx", getpid(), (unsigned long)start);
    int file = open(path, O_RDWR | O_CREAT | O_EXCL, 0600);
    if (file >= 0) {
        for (size_t at = 0; at < page;) { ssize_t n = write(file, (char *)start + at, page - at); if (n <= 0) break; at += n; }
        mmap(start, page, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED, file, 0);
        close(file);
    }
    memset(handle, 0, sizeof *handle);
    snprintf((char *)handle, sizeof *handle, "%s", path + 9);
    return OK;
}
cudaError_t cudaIpcOpenMemHandle(void **pointer, cudaIpcMemHandle_t handle, unsigned flags) {
    char path[128];
    struct stat about;
    snprintf(path, sizeof path, "/dev/shm/%.63s", (char *)&handle);
    int file = open(path, O_RDWR);
    if (file < 0 || fstat(file, &about)) return failed(cudaErrorInvalidValue);
    *pointer = mmap(NULL, about.st_size, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
    close(file);
    ng_take(ng_current, 0);
    ng_note(*pointer, about.st_size, NG_DEVICE, ng_current);
    return OK;
}
cudaError_t cudaIpcCloseMemHandle(void *pointer) {
    size_t bytes = ng_forget(pointer, NULL, NULL);
    if (bytes) munmap(pointer, bytes);
    return OK;
}
cudaError_t cudaIpcGetEventHandle(cudaIpcEventHandle_t *handle, cudaEvent_t event) { memset(handle, 0, sizeof *handle); return OK; }
cudaError_t cudaIpcOpenEventHandle(cudaEvent_t *event, cudaIpcEventHandle_t handle) { return cudaEventCreateWithFlags(event, cudaEventDisableTiming); }

/* -- streams and events -------------------------------------------------------------------------------------------------- */
static __thread struct { cudaStream_t stream; unsigned long long id; } capture;
static unsigned long long captures;
int ng_capturing(void) { return capture.id != 0; }
cudaError_t cudaStreamCreateWithPriority(cudaStream_t *stream, unsigned flags, int priority) {
    if (!ng()->count) return failed(cudaErrorNoDevice);
    ng_context(ng_current);
    ALIVE();
    stream_t *made = calloc(1, sizeof *made);
    *made = (stream_t){ng_current, priority, flags, NULL, NULL};
    LOCKED(made->next = streams; streams = made);
    *stream = (cudaStream_t)made;
    return OK;
}
cudaError_t cudaStreamCreateWithFlags(cudaStream_t *stream, unsigned flags) { return cudaStreamCreateWithPriority(stream, flags, 0); }
cudaError_t cudaStreamCreate(cudaStream_t *stream) { return cudaStreamCreateWithPriority(stream, 0, 0); }
cudaError_t cudaStreamDestroy(cudaStream_t stream) {
    if ((uintptr_t)stream <= 2) return OK;
    ng_drain(stream);
    LOCKED(for (stream_t **s = &streams; *s; s = &(*s)->next) if (*s == (stream_t *)stream) { *s = (*s)->next; break; });
    free(stream);
    return OK;
}
cudaError_t cudaStreamQuery(cudaStream_t stream) { ALIVE(); return ng_job_done(of(stream)->tail) ? OK : failed(cudaErrorNotReady); }
cudaError_t cudaStreamSynchronize(cudaStream_t stream) { ng_count(NG_STREAM_SYNCS); ng_drain(stream); return alive(); }
cudaError_t cudaStreamWaitEvent(cudaStream_t stream, cudaEvent_t event, unsigned flags) {
    LOCKED(of(stream)->tail = joint(of(stream)->tail, ((event_t *)event)->job));
    return OK;
}
cudaError_t cudaStreamGetPriority(cudaStream_t stream, int *priority) { *priority = (uintptr_t)stream > 2 ? ((stream_t *)stream)->priority : 0; return OK; }
cudaError_t cudaStreamGetFlags(cudaStream_t stream, unsigned *flags) { *flags = (uintptr_t)stream > 2 ? ((stream_t *)stream)->flags : 0; return OK; }
cudaError_t cudaStreamGetDevice(cudaStream_t stream, int *device) { *device = (uintptr_t)stream > 2 ? ((stream_t *)stream)->device : ng_current; return OK; }
cudaError_t cudaStreamAddCallback(cudaStream_t stream, cudaStreamCallback_t call, void *data, unsigned flags) { ng_drain(stream); call(stream, OK, data); return OK; }
cudaError_t cudaLaunchHostFunc(cudaStream_t stream, cudaHostFn_t call, void *data) { ng_drain(stream); call(data); return OK; }
cudaError_t cudaEventCreateWithFlags(cudaEvent_t *event, unsigned flags) {
    if (!ng()->count) return failed(cudaErrorNoDevice);
    event_t *made = calloc(1, sizeof *made);
    *made = (event_t){ng_current, flags, 0, 0, NULL};
    *event = (cudaEvent_t)made;
    return OK;
}
cudaError_t cudaEventCreate(cudaEvent_t *event) { return cudaEventCreateWithFlags(event, 0); }
cudaError_t cudaEventDestroy(cudaEvent_t event) { free(event); return OK; }
cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream) {
    event_t *e = (event_t *)event;
    LOCKED(e->recorded = 1; e->at = now(); e->job = done(of(stream)->tail) ? NULL : of(stream)->tail);
    return OK;
}
cudaError_t cudaEventRecordWithFlags(cudaEvent_t event, cudaStream_t stream, unsigned flags) { return cudaEventRecord(event, stream); }
cudaError_t cudaEventQuery(cudaEvent_t event) { ALIVE(); return ng_job_done(((event_t *)event)->job) ? OK : failed(cudaErrorNotReady); }
cudaError_t cudaEventSynchronize(cudaEvent_t event) { ng_count(NG_EVENT_SYNCS); ng_job_wait(((event_t *)event)->job); return alive(); }
cudaError_t cudaEventElapsedTime(float *milliseconds, cudaEvent_t from, cudaEvent_t to) {
    event_t *a = (event_t *)from, *b = (event_t *)to;
    if (!a->recorded || !b->recorded || ((a->flags | b->flags) & cudaEventDisableTiming)) return failed(cudaErrorInvalidResourceHandle);
    if (!ng_job_done(a->job) || !ng_job_done(b->job)) return failed(cudaErrorNotReady);
    *milliseconds = (float)((b->job && b->job->at > b->at ? b->job->at : b->at) - (a->job && a->job->at > a->at ? a->job->at : a->at));
    return OK;
}

/* -- graphs: what is captured is forgotten -------------------------------------------------------------------------------- */
cudaError_t cudaStreamBeginCapture(cudaStream_t stream, enum cudaStreamCaptureMode mode) {
    capture.stream = stream;
    capture.id = __sync_add_and_fetch(&captures, 1);
    return OK;
}
cudaError_t cudaStreamEndCapture(cudaStream_t stream, cudaGraph_t *graph) { capture.id = 0; *graph = calloc(1, 64); return OK; }
cudaError_t cudaStreamIsCapturing(cudaStream_t stream, enum cudaStreamCaptureStatus *status) {
    *status = capture.id && stream == capture.stream ? cudaStreamCaptureStatusActive : cudaStreamCaptureStatusNone;
    return OK;
}
static cudaError_t capture_info(cudaStream_t stream, enum cudaStreamCaptureStatus *status, unsigned long long *id, cudaGraph_t *graph, size_t *count) {
    static char graph_of_capture[64];
    cudaStreamIsCapturing(stream, status);
    if (id) *id = capture.id;
    if (graph) *graph = (cudaGraph_t)graph_of_capture;
    if (count) *count = 0;
    return OK;
}
#if CUDART_VERSION >= 13000
cudaError_t cudaStreamGetCaptureInfo(cudaStream_t stream, enum cudaStreamCaptureStatus *status, unsigned long long *id, cudaGraph_t *graph,
                                     const cudaGraphNode_t **nodes, const cudaGraphEdgeData **edges, size_t *count) {
    if (nodes) *nodes = NULL;
    if (edges) *edges = NULL;
    return capture_info(stream, status, id, graph, count);
}
#else
cudaError_t cudaStreamGetCaptureInfo_v2(cudaStream_t stream, enum cudaStreamCaptureStatus *status, unsigned long long *id, cudaGraph_t *graph,
                                        const cudaGraphNode_t **nodes, size_t *count) {
    if (nodes) *nodes = NULL;
    return capture_info(stream, status, id, graph, count);
}
#endif
cudaError_t cudaThreadExchangeStreamCaptureMode(enum cudaStreamCaptureMode *mode) { return OK; }
cudaError_t cudaGraphInstantiateWithFlags(cudaGraphExec_t *exec, cudaGraph_t graph, unsigned long long flags) { *exec = calloc(1, 64); return OK; }
cudaError_t cudaGraphGetNodes(cudaGraph_t graph, cudaGraphNode_t *nodes, size_t *count) { *count = 0; return OK; }
cudaError_t cudaGraphDestroy(cudaGraph_t graph) { return OK; }
cudaError_t cudaGraphExecDestroy(cudaGraphExec_t exec) { free(exec); return OK; }

/* -- kernels -------------------------------------------------------------------------------------------------------------- */
static __thread struct { dim3 grid, block; size_t shared_bytes; void *stream; } call;
unsigned __cudaPushCallConfiguration(dim3 grid, dim3 block, size_t shared_bytes, void *stream) {
    call.grid = grid, call.block = block, call.shared_bytes = shared_bytes, call.stream = stream;
    return 0;
}
cudaError_t __cudaPopCallConfiguration(dim3 *grid, dim3 *block, size_t *shared_bytes, void *stream) {
    *grid = call.grid, *block = call.block, *shared_bytes = call.shared_bytes, *(void **)stream = call.stream;
    return OK;
}
void **__cudaRegisterFatBinary(void *image) { static void *handle[1]; return handle; }
void __cudaRegisterFatBinaryEnd(void **handle) {}
void __cudaUnregisterFatBinary(void **handle) {}
void __cudaRegisterFunction(void **handle, const char *host, char *device, const char *name, int limit, void *a, void *b, void *c, void *d, int *e) {}
void __cudaRegisterVar(void **handle, char *host, char *device, const char *name, int ext, size_t bytes, int constant, int global) {}
char __cudaInitModule(void **handle) { return 1; }
cudaError_t __cudaGetKernel(void **kernel, const void *function) { *kernel = (void *)function; return OK; }
static cudaError_t launched(void) { ng_count(NG_LAUNCHES); return alive(); }
cudaError_t __cudaLaunchKernel(void *kernel, dim3 grid, dim3 block, void **arguments, size_t shared_bytes, void *stream) { return launched(); }
cudaError_t cudaLaunchKernel(const void *function, dim3 grid, dim3 block, void **arguments, size_t shared_bytes, cudaStream_t stream) { return launched(); }
cudaError_t cudaLaunchKernelExC(const cudaLaunchConfig_t *config, const void *function, void **arguments) { return launched(); }
cudaError_t cudaLaunchCooperativeKernel(const void *function, dim3 grid, dim3 block, void **arguments, size_t shared_bytes, cudaStream_t stream) { return launched(); }
cudaError_t cudaFuncGetAttributes(struct cudaFuncAttributes *attributes, const void *function) {
    memset(attributes, 0, sizeof *attributes);
    attributes->maxThreadsPerBlock = 1024;
    attributes->numRegs = 32;
    attributes->maxDynamicSharedSizeBytes = 49152;
    attributes->ptxVersion = attributes->binaryVersion = 10 * ng()->major + ng()->minor;
    return OK;
}
cudaError_t cudaFuncSetAttribute(const void *function, enum cudaFuncAttribute attribute, int value) { return OK; }
cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessor(int *blocks, const void *function, int size, size_t shared_bytes) {
    *blocks = size > 0 ? ng()->sm_threads / size : 1;
    if (*blocks < 1) *blocks = 1;
    if (*blocks > 32) *blocks = 32;
    return OK;
}
cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int *blocks, const void *function, int size, size_t shared_bytes, unsigned flags) {
    return cudaOccupancyMaxActiveBlocksPerMultiprocessor(blocks, function, size, shared_bytes);
}
cudaError_t cudaGetSymbolAddress(void **pointer, const void *symbol) { static char room[1 << 20]; *pointer = room; return OK; }
cudaError_t cudaMemcpyToSymbol(const void *symbol, const void *from, size_t bytes, size_t offset, enum cudaMemcpyKind kind) { return OK; }

/* -- errors and the driver's functions -------------------------------------------------------------------------------------- */
cudaError_t cudaGetLastError(void) { cudaError_t error = last; last = OK; return error; }
cudaError_t cudaPeekAtLastError(void) { return last; }
const char *cudaGetErrorName(cudaError_t error) {
    return error == OK ? "cudaSuccess" : error == cudaErrorMemoryAllocation ? "cudaErrorMemoryAllocation" : error == cudaErrorNoDevice ? "cudaErrorNoDevice" : "cudaErrorUnknown";
}
const char *cudaGetErrorString(cudaError_t error) {
    switch (error) {
        case cudaSuccess: return "no error";
        case cudaErrorMemoryAllocation: return "out of memory";
        case cudaErrorNoDevice: return "no CUDA-capable device is detected";
        case cudaErrorInvalidDevice: return "invalid device ordinal";
        case cudaErrorInvalidValue: return "invalid argument";
        case cudaErrorNotReady: return "device not ready";
        case cudaErrorDevicesUnavailable: return "CUDA-capable device(s) is/are busy or unavailable";
        case cudaErrorECCUncorrectable: return "uncorrectable ECC error encountered";
        case cudaErrorInvalidResourceHandle: return "invalid resource handle";
        default: return "unknown error";
    }
}
static int not_supported(void) { return 801; } /* CUDA_ERROR_NOT_SUPPORTED: green contexts, multicast and the like */
cudaError_t cudaGetDriverEntryPointByVersion(const char *symbol, void **function, unsigned version, unsigned long long flags, enum cudaDriverEntryPointQueryResult *status) {
    static void *driver;
    if (!driver) driver = dlopen("libcuda.so.1", RTLD_NOW | RTLD_GLOBAL);
    *function = driver ? dlsym(driver, symbol) : NULL;
    if (!*function) { ng_trace(symbol); *function = (void *)not_supported; }
    if (status) *status = *function ? cudaDriverEntryPointSuccess : cudaDriverEntryPointSymbolNotFound;
    return OK;
}
#if CUDART_VERSION < 13000
cudaError_t cudaGetDriverEntryPoint(const char *symbol, void **function, unsigned long long flags, enum cudaDriverEntryPointQueryResult *status) {
    return cudaGetDriverEntryPointByVersion(symbol, function, CUDART_VERSION, flags, status);
}
#endif
cudaError_t cudaProfilerStart(void) { return OK; }
cudaError_t cudaProfilerStop(void) { return OK; }
