/* Counts the live bytes of torch's CPU allocator, over all threads of a process: what is allocated by posix_memalign with an alignment of
 * 64 (c10::alloc_cpu), requested sizes. To be preloaded. The profiler's memory events are kept by thread: a tensor that gloo's thread frees
 * last stays live in their sum. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdatomic.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>

#define SLOTS (1u << 20)

static int (*real_memalign)(void **, size_t, size_t);
static void (*real_free)(void *);
static void *keys[SLOTS];
static size_t sizes[SLOTS];
static atomic_flag lock = ATOMIC_FLAG_INIT;
static long live, peak;

static void take(void) {
  while (atomic_flag_test_and_set_explicit(&lock, memory_order_acquire)) {
  }
}

static void release(void) { atomic_flag_clear_explicit(&lock, memory_order_release); }

static uint32_t slot_of(void *pointer) { return (uint32_t)((((uintptr_t)pointer >> 6) * 0x9e3779b97f4a7c15ull) >> 44) & (SLOTS - 1); }

long autopar_live_bytes(void) { return live; }

long autopar_peak_bytes(void) { return peak; }

void autopar_reset_peak(void) {
  take();
  peak = live;
  release();
}

int posix_memalign(void **out, size_t alignment, size_t size) {
  if (!real_memalign)
    real_memalign = (int (*)(void **, size_t, size_t))dlsym(RTLD_NEXT, "posix_memalign");
  int error = real_memalign(out, alignment, size);
  if (error == 0 && alignment == 64 && *out) {
    take();
    uint32_t slot = slot_of(*out);
    while (keys[slot])
      slot = (slot + 1) & (SLOTS - 1);
    keys[slot] = *out;
    sizes[slot] = size;
    live += (long)size;
    if (live > peak)
      peak = live;
    release();
  }
  return error;
}

void free(void *pointer) {
  if (!real_free)
    real_free = (void (*)(void *))dlsym(RTLD_NEXT, "free");
  if (pointer && ((uintptr_t)pointer & 63) == 0) {
    take();
    uint32_t slot = slot_of(pointer);
    while (keys[slot] && keys[slot] != pointer)
      slot = (slot + 1) & (SLOTS - 1);
    if (keys[slot]) {
      live -= (long)sizes[slot];
      /* Close the gap: later entries of the run move up, so that no search ends too early. */
      uint32_t gap = slot;
      for (uint32_t next = (slot + 1) & (SLOTS - 1); keys[next]; next = (next + 1) & (SLOTS - 1)) {
        uint32_t home = slot_of(keys[next]);
        if (((next - home) & (SLOTS - 1)) >= ((next - gap) & (SLOTS - 1))) {
          keys[gap] = keys[next];
          sizes[gap] = sizes[next];
          gap = next;
        }
      }
      keys[gap] = NULL;
    }
    release();
  }
  real_free(pointer);
}
