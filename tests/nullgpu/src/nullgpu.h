/* State that the stub libraries share. It lives in libcudart's stub; libcuda's, libnvidia-ml's and libnccl's are linked to that. */
#pragma once
#include <pthread.h>
#include <stddef.h>
#include <stdint.h>
#include <sys/types.h>

enum { NG_GPUS = 16, NG_INSTANCES = 7, NG_UNITS = NG_GPUS * (1 + NG_INSTANCES), NG_SLOTS = 256, NG_OTHERS = 8, NG_FAULTS = 8 };
enum { NG_DEVICE = 1, NG_HOST = 2, NG_REGISTERED = 3, NG_RESERVED = 4 };

/* What a process has done so far; control.py has the same names in the same order. */
enum { NG_STREAM_SYNCS, NG_DEVICE_SYNCS, NG_EVENT_SYNCS, NG_BLOCKING_COPIES, NG_PAGEABLE_COPIES, NG_COPIES, NG_LAUNCHES, NG_MALLOCS, NG_FREES,
       NG_HOST_MALLOCS, NG_COLLECTIVES, NG_COUNTERS };

/* -- the file that all processes map; control.py mirrors it ------------------------------------------------------------------- */
typedef struct { int32_t pid; uint32_t pad; uint64_t bytes; } ng_other; /* who isn't there, and yet has memory */
typedef struct { uint64_t from_bytes; uint32_t after, times; } ng_failing; /* allocations of so much fail: after some, so many times */
typedef struct { /* what control.py sets of a GPU or MIG instance */
    ng_other others[NG_OTHERS];
    ng_failing failing;
    uint32_t error;        /* a cudaError_t that every call gets; to NVML the GPU is lost */
    uint32_t utilization;  /* percent */
    uint32_t recovery;     /* NVML's recovery action */
    uint32_t remap_failed; /* a broken row of memory couldn't be replaced */
} ng_settings;
typedef struct { /* the nth collective of that kind by that rank: what becomes of it */
    uint32_t serial; /* 0: none */
    int32_t rank, kind; /* -1: any */
    uint32_t nth, action;
    uint32_t pad;
    double seconds;
} ng_fault;
typedef struct { /* a process */
    int32_t pid;
    uint32_t pad;
    uint64_t started;
    uint64_t bytes[NG_UNITS]; /* the context's included */
    uint64_t counters[NG_COUNTERS];
} ng_slot;
typedef struct {
    uint32_t layout, ready; /* what this is; whether the lock is made */
    ng_settings units[NG_UNITS];
    ng_fault faults[NG_FAULTS];
    ng_slot slots[NG_SLOTS];
    pthread_mutex_t lock;
} ng_shared;

/* -- devices: a unit is a GPU (its number), or a MIG instance of one (behind all GPUs) -------------------------------------------- */
enum { NG_NVSWITCH, NG_NVLINK, NG_P2P, NG_PCIE, NG_HOST_ONLY }; /* how GPUs reach each other */
typedef struct {
    int exists, gpu, instance; /* -1: the GPU itself */
    int instances;             /* of a GPU on which MIG is on; -1 where it is off */
    char name[96], uuid[16];
    uint64_t total, reserved;
    int sms;
} ng_unit;
typedef struct {
    int gpus, count, major, minor, sm_threads, link;
    int visible[NG_GPUS]; /* CUDA's device i is this unit */
    uint64_t context;
    ng_unit units[NG_UNITS];
} ng_config;

const ng_config *ng(void);
const ng_config *ng_devices(void);
const ng_unit *ng_of(int device);
const ng_settings *ng_settings_of(int unit);
int ng_error(int device);                /* a cudaError_t */
int ng_peers(int unit, int other);       /* 1: each reaches the other's memory */
int ng_take(int device, uint64_t bytes); /* 1: there is room for it, and it is counted */
void ng_give(int device, uint64_t bytes);
void ng_context(int device); /* the process's first use of a device counts its context */
int ng_has_context(int device);
uint64_t ng_used(int unit);              /* by all processes that live */
int ng_processes(int unit, pid_t *pids, uint64_t *bytes, int most);
const ng_fault *ng_fault_of(int number); /* the environment's first, then control.py's */
void ng_count(int which);
uint64_t ng_counted(int which);
void ng_trace(const char *name);
uint64_t ng_mib(const char *name, double otherwise);
extern __thread int ng_current;

/* -- addresses ------------------------------------------------------------------------------------------------------------------ */
void ng_note(void *start, size_t bytes, int kind, int device);
size_t ng_forget(void *start, int *kind, int *device);
int ng_find(const void *pointer, void **start, size_t *bytes, int *device); /* the kind, 0 where unknown */
void ng_zero(void *start, size_t bytes);
void ng_copy(void *to, const void *from, size_t bytes);

/* -- NCCL's reductions ------------------------------------------------------------------------------------------------------------ */
void ng_reduce(void *to, char *const *parts, int ranks, size_t count, int type, int op);
int ng_scaled_sum(const void *scalar, int type);

/* -- work that is not done at once (NCCL's): a stream's last such job, and what an event has seen of it ------------------------------ */
typedef struct ng_job {
    int done;
    double at;
    struct ng_job *first, *second; /* a joint of two where set; else a job of a worker's */
    struct ng_job *after;          /* what the stream waited for before */
} ng_job;
ng_job *ng_enqueue(void *stream); /* onto the stream; the caller hands it to a worker */
int ng_job_done(ng_job *job);
void ng_job_wait(ng_job *job);
void ng_job_finish(ng_job *job);
void ng_drain(void *stream);
void ng_drain_all(void);
int ng_capturing(void);
