/* NCCL that really moves and reduces, over files in /dev/shm: every pair of ranks has a ring, every communicator a thread that works its
   calls off in order, as a GPU's stream would. A peer that never comes leaves a collective open until the communicator is aborted. */
#define _GNU_SOURCE
#include "nullgpu.h"
#include <fcntl.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/random.h>
#include <time.h>
#include <unistd.h>

typedef struct { char internal[128]; } ncclUniqueId;
enum { SUCCESS = 0, UNHANDLED_CUDA = 1, INTERNAL = 3, INVALID_ARGUMENT = 4, INVALID_USAGE = 5, REMOTE = 6, IN_PROGRESS = 7 };
enum { SEND, RECV, BROADCAST, REDUCE, ALL_REDUCE, ALL_GATHER, REDUCE_SCATTER, ALL_TO_ALL, INIT };

#define RING (8u << 20)
typedef struct { volatile uint64_t put, got; char pad[48]; char bytes[RING]; } ring_t;
typedef struct { volatile uint32_t joined, left; char pad[4088]; ring_t rings[]; } board_t;
typedef struct comm {
    char name[64];
    int rank, size, device, splits;
    board_t *board;
    size_t mapped;
    volatile int aborted, closing, error;
    pthread_t worker;
    pthread_mutex_t lock;
    pthread_cond_t wake;
    struct batch *first, *last;
    uint64_t calls;
} comm_t;
typedef struct { int kind, type, op, peer; const void *from; void *to; size_t count; } call_t;
typedef struct batch { comm_t *comm; int count; call_t *calls; ng_job *job; struct batch *next; } batch_t;
static __thread int depth;
static __thread struct { comm_t *comm; void *stream; call_t call; } *group;
static __thread int group_count, group_room;

static size_t width(int type) { static const size_t sizes[] = {1, 1, 4, 4, 8, 8, 2, 4, 8, 2, 1, 1}; return sizes[type]; }
static void nap(int *idle) { if (++*idle < 200) sched_yield(); else usleep(*idle < 2000 ? 50 : 500); }
static size_t most(void) { /* calls of more bytes than this only meet, where NULLGPU_COPY_MIB says so */
    const char *text = getenv("NULLGPU_COPY_MIB");
    return text ? (size_t)(atof(text) * 1048576) : (size_t)-1;
}

/* -- one batch of calls: transfers between pairs, each as far as the rings let it ---------------------------------------------- */
typedef struct { ring_t *ring; int sends; char *at; size_t left; } transfer_t;
typedef struct { transfer_t *of; int count, room; } transfers_t;
static ring_t *ring(comm_t *comm, int from, int to) { return &comm->board->rings[(size_t)from * comm->size + to]; }
static void add(transfers_t *all, comm_t *comm, int sends, int peer, const void *at, size_t bytes) {
    if (all->count == all->room) all->of = realloc(all->of, (all->room = all->room ? 2 * all->room : 32) * sizeof *all->of);
    all->of[all->count++] = (transfer_t){sends ? ring(comm, comm->rank, peer) : ring(comm, peer, comm->rank), sends, (char *)at, bytes};
}
static size_t step(transfer_t *t) {
    uint64_t put = t->ring->put, got = t->ring->got;
    __sync_synchronize();
    size_t can = t->sends ? RING - (put - got) : put - got, position = (t->sends ? put : got) % RING;
    if (can > t->left) can = t->left;
    if (can > RING - position) can = RING - position;
    if (!can) return 0;
    if (t->sends) memcpy(t->ring->bytes + position, t->at, can); else memcpy(t->at, t->ring->bytes + position, can);
    __sync_synchronize();
    if (t->sends) t->ring->put = put + can; else t->ring->got = got + can;
    t->at += can, t->left -= can;
    return can;
}
static int work(comm_t *comm, transfers_t *all) { /* the calls of a pair and direction in their order */
    int open = all->count, idle = 0;
    while (open) {
        size_t moved = 0;
        open = 0;
        for (int i = 0; i < all->count; i++) {
            transfer_t *t = &all->of[i];
            if (!t->left) continue;
            int behind = 0;
            for (int j = 0; j < i && !behind; j++) behind = all->of[j].left && all->of[j].ring == t->ring && all->of[j].sends == t->sends;
            if (!behind) moved += step(t);
            open += t->left > 0;
        }
        if (comm->aborted) return 0;
        if (moved) idle = 0; else if (open) nap(&idle);
    }
    return 1;
}

static int perform(comm_t *comm, call_t *calls, int count) {
    transfers_t all = {0};
    int n = comm->size, me = comm->rank, fine;
    char **rooms = calloc((size_t)count, sizeof *rooms); /* what a reduction's other ranks send */
    for (int c = 0; c < count; c++) {
        call_t *k = &calls[c];
        size_t bytes = k->count * width(k->type);
        int reduces = k->kind == REDUCE || k->kind == ALL_REDUCE || k->kind == REDUCE_SCATTER;
        size_t limit = most(), part = bytes;
        if (bytes > limit) part = 1; /* a meeting only: one byte between each pair, into a place of its own */
        static char nowhere[8];
        if (reduces) rooms[c] = mmap(NULL, part * n + 1, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
        for (int p = 0; p < n; p++) {
            if (p == me) continue;
            const char *out = NULL;
            char *in = NULL;
            switch (k->kind) {
                case SEND: if (p == k->peer) out = k->from; break;
                case RECV: if (p == k->peer) in = k->to; break;
                case BROADCAST: if (me == k->peer) out = k->from; else if (p == k->peer) in = k->to; break;
                case ALL_GATHER: out = k->from, in = (char *)k->to + p * bytes; break;
                case ALL_TO_ALL: out = (const char *)k->from + p * bytes, in = (char *)k->to + p * bytes; break;
                case REDUCE: if (me == k->peer) in = rooms[c] + p * part; else if (p == k->peer) out = k->from; break;
                case ALL_REDUCE: out = k->from, in = rooms[c] + p * part; break;
                case REDUCE_SCATTER: out = (const char *)k->from + p * bytes, in = rooms[c] + p * part; break;
            }
            if (part != bytes) out = out ? nowhere : NULL, in = in ? nowhere : NULL;
            if (out && part) add(&all, comm, 1, p, out, part);
            if (in && part) add(&all, comm, 0, p, in, part);
        }
        if (part == bytes && !reduces && k->from && k->to) { /* its own share, and what it sends itself */
            if (k->kind == BROADCAST && me == k->peer && k->to != k->from) memmove(k->to, k->from, bytes);
            char *own = (char *)k->to + me * bytes;
            if (k->kind == ALL_GATHER && own != k->from) memmove(own, k->from, bytes);
            if (k->kind == ALL_TO_ALL) memmove(own, (const char *)k->from + me * bytes, bytes);
        }
    }
    for (int s = 0, r = 0; s < count; s++) { /* sends to itself meet its receives from itself */
        if (calls[s].kind != SEND || calls[s].peer != me) continue;
        for (; r < count && !(calls[r].kind == RECV && calls[r].peer == me); r++) {}
        if (r < count) memmove(calls[r].to, calls[s].from, calls[s].count * width(calls[s].type)), r++;
    }
    fine = work(comm, &all);
    for (int c = 0; c < count; c++) {
        call_t *k = &calls[c];
        if (!rooms[c]) continue;
        size_t bytes = k->count * width(k->type), part = bytes > most() ? 1 : bytes;
        if (fine && part == bytes && (k->kind != REDUCE || me == k->peer)) {
            char *parts[n];
            for (int p = 0; p < n; p++) parts[p] = p == me ? (char *)k->from + (k->kind == REDUCE_SCATTER ? me * bytes : 0) : rooms[c] + p * part;
            ng_reduce(k->to, parts, n, k->count, k->type, k->op);
        }
        munmap(rooms[c], part * n + 1);
    }
    free(rooms);
    free(all.of);
    return fine;
}

/* -- what goes wrong where a test wants it ---------------------------------------------------------------------------------------- */
enum { KILL, STOP, HANG, ERROR };
static void hang(comm_t *comm, double seconds) { /* the GPU alone: its process lives */
    struct timespec start, now;
    clock_gettime(CLOCK_MONOTONIC, &start);
    do {
        usleep(10000);
        clock_gettime(CLOCK_MONOTONIC, &now);
    } while (!comm->aborted && (seconds <= 0 || now.tv_sec - start.tv_sec + (now.tv_nsec - start.tv_nsec) * 1e-9 < seconds));
}
static void misfortune(comm_t *comm, int kind) {
    static uint32_t serials[NG_FAULTS + 1], met[NG_FAULTS + 1];
    for (int i = 0; i <= NG_FAULTS; i++) {
        const ng_fault *fault = ng_fault_of(i);
        if (!fault || !fault->serial || comm->size < 2) continue;
        if ((fault->rank >= 0 && fault->rank != comm->rank) || (fault->kind >= 0 && fault->kind != kind)) continue;
        if (serials[i] != fault->serial) serials[i] = fault->serial, met[i] = 0;
        if (++met[i] != fault->nth) continue;
        if (fault->action == KILL) pthread_kill(pthread_self(), SIGKILL);
        if (fault->action == STOP) pthread_kill(pthread_self(), SIGSTOP);
        if (fault->action == HANG) hang(comm, fault->seconds);
        if (fault->action == ERROR) { comm->error = REMOTE; hang(comm, 0); }
    }
    if (ng_error(comm->device)) { comm->error = UNHANDLED_CUDA; hang(comm, 0); }
}

static void *serve(void *argument) {
    comm_t *comm = argument;
    for (;;) {
        pthread_mutex_lock(&comm->lock);
        while (!comm->first && !comm->closing) pthread_cond_wait(&comm->wake, &comm->lock);
        batch_t *batch = comm->first;
        if (batch && !(comm->first = batch->next)) comm->last = NULL;
        pthread_mutex_unlock(&comm->lock);
        if (!batch) return NULL;
        ng_job_wait(batch->job->after);
        for (int i = 0; i < batch->count && !comm->aborted; i++) misfortune(comm, batch->calls[i].kind);
        if (!comm->aborted) perform(comm, batch->calls, batch->count);
        ng_job_finish(batch->job);
        free(batch->calls);
        free(batch);
    }
}

/* -- calls ------------------------------------------------------------------------------------------------------------------ */
static void submit(comm_t *comm, void *stream, call_t *calls, int count) {
    batch_t *batch = calloc(1, sizeof *batch);
    batch->comm = comm, batch->count = count;
    batch->calls = malloc(count * sizeof *calls);
    memcpy(batch->calls, calls, count * sizeof *calls);
    pthread_mutex_lock(&comm->lock);
    batch->job = ng_enqueue(stream);
    if (comm->last) comm->last->next = batch; else comm->first = batch;
    comm->last = batch;
    pthread_cond_signal(&comm->wake);
    pthread_mutex_unlock(&comm->lock);
}
int ncclGroupStart(void) { depth++; return SUCCESS; }
int ncclGroupEnd(void) {
    if (--depth > 0) return SUCCESS;
    for (int i = 0; i < group_count; i++) { /* a batch for each communicator */
        comm_t *comm = group[i].comm;
        if (!comm) continue;
        call_t calls[group_count];
        int count = 0;
        for (int j = i; j < group_count; j++) if (group[j].comm == comm) { calls[count++] = group[j].call; if (j > i) group[j].comm = NULL; }
        submit(comm, group[i].stream, calls, count);
    }
    group_count = 0;
    return SUCCESS;
}
static int put(comm_t *comm, void *stream, call_t call) {
    if (comm->aborted) return INVALID_USAGE;
    ncclGroupStart();
    if (group_count == group_room) group = realloc(group, (group_room = group_room ? 2 * group_room : 64) * sizeof *group);
    group[group_count].comm = comm, group[group_count].stream = stream, group[group_count++].call = call;
    ng_count(NG_COLLECTIVES);
    return ncclGroupEnd();
}
#define CALL(...) put(comm, stream, (call_t){__VA_ARGS__})
int ncclSend(const void *from, size_t count, int type, int peer, comm_t *comm, void *stream) { return CALL(SEND, type, 0, peer, from, NULL, count); }
int ncclRecv(void *to, size_t count, int type, int peer, comm_t *comm, void *stream) { return CALL(RECV, type, 0, peer, NULL, to, count); }
int ncclBroadcast(const void *from, void *to, size_t count, int type, int root, comm_t *comm, void *stream) { return CALL(BROADCAST, type, 0, root, from, to, count); }
int ncclBcast(void *data, size_t count, int type, int root, comm_t *comm, void *stream) { return ncclBroadcast(data, data, count, type, root, comm, stream); }
int ncclReduce(const void *from, void *to, size_t count, int type, int op, int root, comm_t *comm, void *stream) { return CALL(REDUCE, type, op, root, from, to, count); }
int ncclAllReduce(const void *from, void *to, size_t count, int type, int op, comm_t *comm, void *stream) { return CALL(ALL_REDUCE, type, op, 0, from, to, count); }
int ncclAllGather(const void *from, void *to, size_t count, int type, comm_t *comm, void *stream) { return CALL(ALL_GATHER, type, 0, 0, from, to, count); }
int ncclReduceScatter(const void *from, void *to, size_t count, int type, int op, comm_t *comm, void *stream) { return CALL(REDUCE_SCATTER, type, op, 0, from, to, count); }
int ncclAlltoAll(const void *from, void *to, size_t count, int type, comm_t *comm, void *stream) { return CALL(ALL_TO_ALL, type, 0, 0, from, to, count); }
int ncclRedOpCreatePreMulSum(int *op, void *scalar, int type, int residence, comm_t *comm) {
    *op = ng_scaled_sum(scalar, type);
    return SUCCESS;
}

/* -- communicators ------------------------------------------------------------------------------------------------------------ */
static int made(comm_t **comm, const char *name, int size, int rank) {
    comm_t *c = calloc(1, sizeof *c);
    snprintf(c->name, sizeof c->name, "%s", name);
    c->size = size, c->rank = rank, c->device = ng_current;
    char path[96];
    snprintf(path, sizeof path, "/dev/shm/%s", c->name);
    c->mapped = sizeof(board_t) + (size_t)size * size * sizeof(ring_t);
    int file = open(path, O_RDWR | O_CREAT | O_CLOEXEC, 0600);
    if (file < 0 || ftruncate(file, c->mapped)) return INTERNAL;
    c->board = mmap(NULL, c->mapped, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
    close(file);
    ng_context(ng_current);
    *comm = c;
    misfortune(c, INIT);
    __sync_add_and_fetch(&c->board->joined, 1);
    for (int idle = 0; c->board->joined < (uint32_t)size && !c->aborted;) nap(&idle);
    unlink(path);
    pthread_mutex_init(&c->lock, NULL);
    pthread_cond_init(&c->wake, NULL);
    pthread_create(&c->worker, NULL, serve, c);
    return SUCCESS;
}
int ncclGetVersion(int *version) { *version = NULLGPU_NCCL; return SUCCESS; }
int ncclGetUniqueId(ncclUniqueId *id) {
    uint64_t random[2];
    if (getrandom(random, sizeof random, 0) < 0) return INTERNAL;
    memset(id, 0, sizeof *id);
    snprintf(id->internal, sizeof id->internal, "nullgpu.nccl.%016lx%016lx", random[0], random[1]);
    return SUCCESS;
}
int ncclCommInitRankConfig(comm_t **comm, int size, ncclUniqueId id, int rank, void *config) { return made(comm, id.internal, size, rank); }
int ncclCommInitRank(comm_t **comm, int size, ncclUniqueId id, int rank) { return made(comm, id.internal, size, rank); }
int ncclCommInitRankScalable(comm_t **comm, int size, int rank, int ids, ncclUniqueId *id, void *config) { return made(comm, id->internal, size, rank); }
int ncclCommInitAll(comm_t **comm, int size, const int *devices) { return INVALID_USAGE; }
int ncclCommSplit(comm_t *comm, int color, int key, comm_t **child, void *config) {
    int own[2] = {color, key}, all[2 * comm->size], size = 0, rank = 0;
    call_t call = {ALL_GATHER, 2, 0, 0, own, all, 2};
    batch_t *batch = calloc(1, sizeof *batch);
    batch->comm = comm, batch->count = 1, batch->calls = malloc(sizeof call), *batch->calls = call, batch->job = calloc(1, sizeof(ng_job));
    ng_job *job = batch->job;
    pthread_mutex_lock(&comm->lock);
    if (comm->last) comm->last->next = batch; else comm->first = batch;
    comm->last = batch;
    pthread_cond_signal(&comm->wake);
    pthread_mutex_unlock(&comm->lock);
    ng_job_wait(job);
    comm->splits++;
    *child = NULL;
    if (color < 0) return SUCCESS;
    for (int p = 0; p < comm->size; p++) {
        if (all[2 * p] != color) continue;
        size++;
        if (all[2 * p + 1] < key || (all[2 * p + 1] == key && p < comm->rank)) rank++;
    }
    char name[64];
    snprintf(name, sizeof name, "%.45s.%x.%x", comm->name, comm->splits, color & 0xfffff);
    return made(child, name, size, rank);
}
static int closed(comm_t *comm) {
    pthread_mutex_lock(&comm->lock);
    int first = !comm->closing;
    comm->closing = 1;
    pthread_cond_broadcast(&comm->wake);
    pthread_mutex_unlock(&comm->lock);
    if (first) {
        pthread_join(comm->worker, NULL);
        munmap(comm->board, comm->mapped); /* the communicator itself is left: a late question finds it */
    }
    return SUCCESS;
}
int ncclCommFinalize(comm_t *comm) { return SUCCESS; }
int ncclCommDestroy(comm_t *comm) { return closed(comm); }
int ncclCommAbort(comm_t *comm) { comm->aborted = 1; return closed(comm); }
int ncclCommGetAsyncError(comm_t *comm, int *error) { *error = comm->error; return SUCCESS; }
int ncclCommCount(comm_t *comm, int *count) { *count = comm->size; return SUCCESS; }
int ncclCommUserRank(comm_t *comm, int *rank) { *rank = comm->rank; return SUCCESS; }
int ncclCommCuDevice(comm_t *comm, int *device) { *device = comm->device; return SUCCESS; }
int cudaMalloc(void **, size_t);
int cudaFree(void *);
int ncclMemAlloc(void **pointer, size_t bytes) { return cudaMalloc(pointer, bytes) ? INTERNAL : SUCCESS; }
int ncclMemFree(void *pointer) { return cudaFree(pointer) ? INTERNAL : SUCCESS; }
const char *ncclGetErrorString(int error) { return error == SUCCESS ? "no error" : error == INVALID_USAGE ? "invalid usage" : error == IN_PROGRESS ? "NCCL operation in progress" : "internal error"; }
const char *ncclGetLastError(comm_t *comm) { return ""; }
