/* Which addresses are device memory, and copies between them. */
#define _GNU_SOURCE
#include "nullgpu.h"
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

/* Addresses: a sorted array, found by halving. */
typedef struct { char *start; size_t bytes; int kind, device; } range_t;
static range_t *ranges;
static size_t range_count, range_room;
static pthread_mutex_t range_lock = PTHREAD_MUTEX_INITIALIZER;

static size_t place(const char *start) {
    size_t low = 0, high = range_count;
    while (low < high) {
        size_t middle = (low + high) / 2;
        if (ranges[middle].start <= start) low = middle + 1; else high = middle;
    }
    return low; /* the first range that starts behind it */
}
void ng_note(void *start, size_t bytes, int kind, int device) {
    pthread_mutex_lock(&range_lock);
    if (range_count == range_room) ranges = realloc(ranges, (range_room = range_room ? 2 * range_room : 256) * sizeof *ranges);
    size_t at = place(start);
    memmove(ranges + at + 1, ranges + at, (range_count++ - at) * sizeof *ranges);
    ranges[at] = (range_t){start, bytes, kind, device};
    pthread_mutex_unlock(&range_lock);
}
size_t ng_forget(void *start, int *kind, int *device) {
    size_t bytes = 0;
    pthread_mutex_lock(&range_lock);
    size_t at = place(start);
    if (at && ranges[at - 1].start == start) {
        bytes = ranges[at - 1].bytes;
        if (kind) *kind = ranges[at - 1].kind;
        if (device) *device = ranges[at - 1].device;
        memmove(ranges + at - 1, ranges + at, (range_count-- - at) * sizeof *ranges);
    }
    pthread_mutex_unlock(&range_lock);
    return bytes;
}
int ng_find(const void *pointer, void **start, size_t *bytes, int *device) {
    int kind = 0;
    pthread_mutex_lock(&range_lock);
    size_t at = place(pointer);
    if (at && (const char *)pointer < ranges[at - 1].start + ranges[at - 1].bytes) {
        range_t *found = &ranges[at - 1];
        kind = found->kind;
        if (start) *start = found->start;
        if (bytes) *bytes = found->bytes;
        if (device) *device = found->device;
    }
    pthread_mutex_unlock(&range_lock);
    return kind;
}

/* Zeros over whole pages are given back to the system rather than written: a fake 70 GB model takes no memory of the host's. */
void ng_zero(void *start, size_t bytes) {
    uintptr_t from = ((uintptr_t)start + 4095) & ~(uintptr_t)4095, to = ((uintptr_t)start + bytes) & ~(uintptr_t)4095;
    if (bytes >= 1 << 20 && to > from && ng_find(start, NULL, NULL, NULL) == NG_DEVICE) {
        memset(start, 0, from - (uintptr_t)start);
        madvise((void *)from, to - from, MADV_DONTNEED);
        memset((void *)to, 0, (uintptr_t)start + bytes - to);
    } else memset(start, 0, bytes);
}
void ng_copy(void *to, const void *from, size_t bytes) {
    static size_t most = (size_t)-2;
    if (most == (size_t)-2) most = getenv("NULLGPU_COPY_MIB") ? ng_mib("NULLGPU_COPY_MIB", 0) : (size_t)-1;
    if (bytes <= most) memmove(to, from, bytes); /* larger ones are left out where only memory's accounts are wanted */
}
