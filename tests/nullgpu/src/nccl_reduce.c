/* What NCCL's reductions compute, by type and operation; a scalar that each rank's share is multiplied by first is an operation of its own. */
#include "nullgpu.h"
#include <string.h>

enum { SUM, PROD, MAX, MIN, AVG, PREMUL = 5 };
enum { SCALARS = 4096 };
static double scalars[SCALARS];
static int scalar_count;
static float bf16(uint16_t v) { uint32_t bits = (uint32_t)v << 16; float f; memcpy(&f, &bits, 4); return f; }
static uint16_t to_bf16(float f) {
    uint32_t bits; memcpy(&bits, &f, 4);
    if ((bits & 0x7fffffff) > 0x7f800000) return 0x7fc0;
    return (uint16_t)((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
}
#define COMBINE(acc, v) (op == PROD ? (acc) * (v) : op == MAX ? ((v) > (acc) ? (v) : (acc)) : op == MIN ? ((v) < (acc) ? (v) : (acc)) : (acc) + (v))
#define FLOATS(T, A, LOAD, STORE) for (size_t i = 0; i < count; i++) { \
        A acc = (A)(LOAD(((const T *)parts[0])[i]) * (A)scale); \
        for (int r = 1; r < ranks; r++) { A v = (A)(LOAD(((const T *)parts[r])[i]) * (A)scale); acc = COMBINE(acc, v); } \
        if (op == AVG) acc = acc / (A)ranks; \
        ((T *)to)[i] = STORE(acc); }
#define INTEGERS(T) for (size_t i = 0; i < count; i++) { \
        T acc = ((const T *)parts[0])[i]; \
        for (int r = 1; r < ranks; r++) { T v = ((const T *)parts[r])[i]; acc = (T)COMBINE(acc, v); } \
        if (op == AVG) acc = (T)(acc / (T)ranks); \
        ((T *)to)[i] = acc; }
#define SAME(x) (x)
void ng_reduce(void *to, char *const *parts, int ranks, size_t count, int type, int op) {
    double scale = op >= PREMUL ? scalars[op - PREMUL] : 1.0;
    if (op >= PREMUL) op = SUM;
    switch (type) {
        case 0: INTEGERS(int8_t) break;
        case 1: INTEGERS(uint8_t) break;
        case 2: INTEGERS(int32_t) break;
        case 3: INTEGERS(uint32_t) break;
        case 4: INTEGERS(int64_t) break;
        case 5: INTEGERS(uint64_t) break;
        case 6: FLOATS(_Float16, float, SAME, SAME) break;
        case 7: FLOATS(float, float, SAME, SAME) break;
        case 8: FLOATS(double, double, SAME, SAME) break;
        case 9: FLOATS(uint16_t, float, bf16, to_bf16) break;
    }
}

int ng_scaled_sum(const void *scalar, int type) { /* the operation */
    int slot = __sync_fetch_and_add(&scalar_count, 1) % SCALARS;
    switch (type) {
        case 6: scalars[slot] = *(const _Float16 *)scalar; break;
        case 7: scalars[slot] = *(const float *)scalar; break;
        case 8: scalars[slot] = *(const double *)scalar; break;
        case 9: scalars[slot] = bf16(*(const uint16_t *)scalar); break;
        default: scalars[slot] = 1;
    }
    return PREMUL + slot;
}
