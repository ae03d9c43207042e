/* Who holds how much of each device, and what has been set while processes run: a file that all of them map. */
#define _GNU_SOURCE
#include "settings.h"
#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

enum { LAYOUT = 0x6e673032 }; /* control.py's too: what lies in a file of another layout is forgotten */
__thread int ng_current = 0;
static ng_config config;
static ng_shared *shared;
static ng_slot *own;
static ng_settings own_settings[NG_UNITS];
static ng_fault own_fault;
static pthread_once_t once = PTHREAD_ONCE_INIT;
static int tracing;
static int counts; /* whether CUDA has counted its devices in this process */
static uint8_t contexts[NG_UNITS];
static uint64_t counters[NG_COUNTERS];

static uint64_t started(pid_t pid) { /* field 22 of /proc/<pid>/stat: a pid that was given anew is another process */
    char path[64], line[1024];
    snprintf(path, sizeof path, "/proc/%d/stat", pid);
    int file = open(path, O_RDONLY | O_CLOEXEC);
    if (file < 0) return 0;
    ssize_t read_bytes = read(file, line, sizeof line - 1);
    close(file);
    if (read_bytes <= 0) return 0;
    line[read_bytes] = 0;
    char *at = strrchr(line, ')');
    for (int field = 2; at && field < 22; field++) at = strchr(at + 1, ' ');
    return at ? strtoull(at + 1, NULL, 10) : 0;
}

static void hold(void) {
    int error = pthread_mutex_lock(&shared->lock);
    if (error == EOWNERDEAD) pthread_mutex_consistent(&shared->lock);
}

static void after_fork(void) {
    own = NULL;
    counts = 0;
    memset(contexts, 0, sizeof contexts);
    memset(counters, 0, sizeof counters);
}

static void map_state(void) {
    char path[256];
    const char *text = getenv("NULLGPU_STATE");
    if (text) snprintf(path, sizeof path, "%s", text);
    else snprintf(path, sizeof path, "/dev/shm/nullgpu.%d", (int)getuid());
    int file = open(path, O_RDWR | O_CREAT | O_CLOEXEC, 0600);
    if (file < 0) { fprintf(stderr, "nullgpu: %s: %s\n", path, strerror(errno)); abort(); }
    struct flock range = {.l_type = F_WRLCK, .l_whence = SEEK_SET};
    fcntl(file, F_SETLKW, &range);
    if (ftruncate(file, sizeof(ng_shared))) abort();
    shared = mmap(NULL, sizeof *shared, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
    if (shared == MAP_FAILED) abort();
    if (shared->layout != LAYOUT) memset(shared, 0, sizeof *shared);
    if (!shared->ready) { /* what control.py has set before stays */
        pthread_mutexattr_t attributes;
        pthread_mutexattr_init(&attributes);
        pthread_mutexattr_setpshared(&attributes, PTHREAD_PROCESS_SHARED);
        pthread_mutexattr_setrobust(&attributes, PTHREAD_MUTEX_ROBUST);
        pthread_mutex_init(&shared->lock, &attributes);
        shared->layout = LAYOUT, shared->ready = 1;
    }
    range.l_type = F_UNLCK;
    fcntl(file, F_SETLK, &range);
    close(file);
}

static void start(void) {
    tracing = getenv("NULLGPU_TRACE") != NULL;
    ng_read_settings(&config);
    if (!config.gpus) return;
    ng_read_own(own_settings);
    ng_read_fault(&own_fault);
    map_state();
    pthread_atfork(NULL, NULL, after_fork);
}

const ng_config *ng(void) { pthread_once(&once, start); return &config; }
const ng_config *ng_devices(void) { /* a forked process may have been told others to see than its parent, which asked NVML alone */
    ng();
    if (!counts) ng_read_visible(&config);
    counts = 1;
    return &config;
}
const ng_unit *ng_of(int device) { return &ng()->units[config.visible[device]]; }
const ng_settings *ng_settings_of(int unit) { return ng()->gpus ? &shared->units[unit] : &own_settings[unit]; }
int ng_error(int device) {
    if (!ng()->gpus || device < 0 || device >= config.count) return 0;
    int unit = config.visible[device], gpu = config.units[unit].gpu; /* an instance goes with its GPU */
    if (shared->units[unit].error) return (int)shared->units[unit].error;
    return (int)(shared->units[gpu].error ? shared->units[gpu].error : own_settings[gpu].error);
}
int ng_peers(int unit, int other) { return unit < NG_GPUS && other < NG_GPUS && unit != other && ng()->link <= NG_P2P; }
const ng_fault *ng_fault_of(int number) {
    if (!ng()->gpus || number > NG_FAULTS) return NULL;
    return number ? &shared->faults[number - 1] : &own_fault;
}

/* -- who holds how much ----------------------------------------------------------------------------------------------------------- */
static void sweep(void) { /* what died holds nothing */
    for (int i = 0; i < NG_SLOTS; i++) {
        ng_slot *slot = &shared->slots[i];
        if (slot->pid && slot != own && (kill(slot->pid, 0) && errno == ESRCH ? 1 : started(slot->pid) != slot->started))
            memset(slot, 0, sizeof *slot);
    }
}

static void take_slot(void) {
    if (own) return;
    for (int i = 0; i < NG_SLOTS && !own; i++)
        if (!shared->slots[i].pid) own = &shared->slots[i];
    if (!own) { fprintf(stderr, "nullgpu: more than %d processes\n", NG_SLOTS); abort(); }
    memset(own, 0, sizeof *own);
    memcpy(own->counters, counters, sizeof counters);
    own->started = started(getpid());
    own->pid = getpid();
}

static uint64_t used(int unit) {
    uint64_t sum = 0;
    for (int i = 0; i < NG_SLOTS; i++) if (shared->slots[i].pid) sum += shared->slots[i].bytes[unit];
    for (int i = 0; i < NG_OTHERS; i++) {
        if (shared->units[unit].others[i].pid) sum += shared->units[unit].others[i].bytes;
        if (own_settings[unit].others[i].pid) sum += own_settings[unit].others[i].bytes;
    }
    for (int i = 0; i < config.units[unit].instances; i++) sum += used(NG_GPUS + unit * NG_INSTANCES + i);
    return sum;
}

void ng_context(int device) {
    if (device < 0 || device >= ng()->count || contexts[device]) return;
    contexts[device] = 1;
    hold();
    sweep();
    take_slot();
    own->bytes[config.visible[device]] += config.context;
    pthread_mutex_unlock(&shared->lock);
}
int ng_has_context(int device) { return contexts[device]; }

static int fails(ng_failing *failing, uint64_t bytes) {
    if (!failing->times || bytes < failing->from_bytes) return 0;
    if (failing->after) { failing->after--; return 0; }
    failing->times--;
    return 1;
}

int ng_take(int device, uint64_t bytes) {
    ng_context(device);
    int unit = config.visible[device], fits;
    hold();
    fits = used(unit) + bytes <= config.units[unit].total;
    if (!fits) { sweep(); fits = used(unit) + bytes <= config.units[unit].total; }
    if (fits && bytes && (fails(&shared->units[unit].failing, bytes) || fails(&own_settings[unit].failing, bytes))) fits = 0;
    if (fits) own->bytes[unit] += bytes;
    pthread_mutex_unlock(&shared->lock);
    return fits;
}
void ng_give(int device, uint64_t bytes) {
    ng();
    if (!own) return;
    hold();
    own->bytes[config.visible[device]] -= bytes;
    pthread_mutex_unlock(&shared->lock);
}
uint64_t ng_used(int unit) {
    if (!ng()->gpus) return 0;
    hold();
    sweep();
    uint64_t sum = used(unit);
    pthread_mutex_unlock(&shared->lock);
    return sum < config.units[unit].total ? sum : config.units[unit].total;
}

typedef struct { pid_t *pids; uint64_t *bytes; int most, found; } listing;
static void list(listing *all, pid_t pid, uint64_t bytes) {
    if (!pid || !bytes) return;
    if (all->found < all->most) all->pids[all->found] = pid, all->bytes[all->found] = bytes;
    all->found++;
}
int ng_processes(int unit, pid_t *pids, uint64_t *bytes, int most) {
    if (!ng()->gpus) return 0;
    listing all = {pids, bytes, most, 0};
    hold();
    sweep();
    for (int i = 0; i < NG_SLOTS; i++) list(&all, shared->slots[i].pid, shared->slots[i].bytes[unit]);
    for (int i = 0; i < NG_OTHERS; i++) {
        list(&all, shared->units[unit].others[i].pid, shared->units[unit].others[i].bytes);
        list(&all, own_settings[unit].others[i].pid, own_settings[unit].others[i].bytes);
    }
    pthread_mutex_unlock(&shared->lock);
    return all.found;
}

/* -- counts ----------------------------------------------------------------------------------------------------------------------- */
void ng_count(int which) {
    __atomic_fetch_add(&counters[which], 1, __ATOMIC_RELAXED);
    if (own) __atomic_fetch_add(&own->counters[which], 1, __ATOMIC_RELAXED);
}
uint64_t ng_counted(int which) { return which < NG_COUNTERS ? __atomic_load_n(&counters[which], __ATOMIC_RELAXED) : 0; }
void ng_trace(const char *name) {
    ng();
    if (tracing) fprintf(stderr, "nullgpu: %s\n", name);
}
