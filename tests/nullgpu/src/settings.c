/* What the environment says there is: GPUs, MIG instances of them, and which of both CUDA shows this process. */
#define _GNU_SOURCE
#include "settings.h"
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

uint64_t ng_mib(const char *name, double otherwise) {
    const char *text = getenv(name);
    return (uint64_t)((text && *text ? atof(text) : otherwise) * 1048576.0);
}

/* The number-th of a list with commas; the last holds for all that follow. */
static const char *item(const char *name, const char *otherwise, int number) {
    static __thread char room[256];
    const char *text = getenv(name);
    if (!text || !*text) text = otherwise;
    for (const char *comma; number > 0 && (comma = strchr(text, ',')); number--) text = comma + 1;
    snprintf(room, sizeof room, "%.*s", (int)strcspn(text, ","), text);
    return room;
}

static void gpu(ng_config *c, int number) {
    ng_unit *unit = &c->units[number];
    *unit = (ng_unit){.exists = 1, .gpu = number, .instance = -1, .instances = -1, .uuid = "nullgpu"};
    unit->uuid[15] = (char)number;
    snprintf(unit->name, sizeof unit->name, "%s", item("NULLGPU_NAME", "NVIDIA H100 80GB HBM3", number));
    unit->sms = atoi(item("NULLGPU_SMS", "132", number));
    unit->total = (uint64_t)(atof(item("NULLGPU_MEMORY_MIB", "81079", number)) * 1048576.0); /* an H100's of 80 GB */
    unit->reserved = ng_mib("NULLGPU_RESERVED_MIB", 480);
}

/* "0:3g.40gb/3g.40gb,1:7g.80gb" */
static void instances(ng_config *c) {
    const char *text = getenv("NULLGPU_MIG");
    char list[512];
    snprintf(list, sizeof list, "%s", text ? text : "");
    for (char *rest = list, *entry; (entry = strsep(&rest, ","));) {
        char *profiles = strchr(entry, ':');
        int number = atoi(entry);
        if (!profiles || number < 0 || number >= c->gpus) continue;
        profiles++;
        ng_unit *whole = &c->units[number];
        whole->instances = 0;
        for (char *profile; (profile = strsep(&profiles, "/")) && whole->instances < NG_INSTANCES;) {
            int slices = 0, gb = 0;
            if (sscanf(profile, "%dg.%dgb", &slices, &gb) != 2) continue;
            ng_unit *unit = &c->units[NG_GPUS + number * NG_INSTANCES + whole->instances];
            *unit = *whole;
            unit->instance = whole->instances++;
            unit->uuid[14] = (char)(1 + unit->instance);
            snprintf(unit->name, sizeof unit->name, "%.60s MIG %.20s", whole->name, profile);
            unit->sms = whole->sms * slices / NG_INSTANCES;
            unit->total = (uint64_t)gb * 1000000000;
            unit->reserved = 0;
        }
    }
}

static void show(ng_config *c, int number) { /* a GPU, or the instances in its place */
    const ng_unit *unit = &c->units[number];
    if (unit->instances < 0) c->visible[c->count++] = number;
    for (int i = 0; i < unit->instances && c->count < NG_GPUS; i++) c->visible[c->count++] = NG_GPUS + number * NG_INSTANCES + i;
}

void ng_read_visible(ng_config *c) {
    c->count = 0;
    const char *text = getenv("CUDA_VISIBLE_DEVICES");
    if (!text) for (int i = 0; i < c->gpus && c->count < NG_GPUS; i++) show(c, i);
    char list[1024];
    snprintf(list, sizeof list, "%s", text ? text : "");
    for (char *rest = list, *entry; text && (entry = strsep(&rest, ",")) && c->count < NG_GPUS;) {
        size_t length = strlen(entry);
        int index = -1;
        if (!strncmp(entry, "GPU-", 4)) index = (int)strtol(entry + length - 2, NULL, 16);
        else if (!strncmp(entry, "MIG-", 4)) {
            int both = (int)strtol(entry + length - 4, NULL, 16);
            int unit = NG_GPUS + (both & 0xff) * NG_INSTANCES + (both >> 8) - 1;
            if (unit < NG_GPUS || unit >= NG_UNITS || !c->units[unit].exists) break;
            c->visible[c->count++] = unit;
            continue;
        } else if (*entry >= '0' && *entry <= '9') index = atoi(entry);
        if (index < 0 || index >= c->gpus) break; /* as CUDA: what follows a wrong one is not visible */
        show(c, index);
    }
    for (int i = 0; i < c->count; i++) /* a process has one MIG instance, the first, and nothing beside it */
        if (c->visible[i] >= NG_GPUS) { c->visible[0] = c->visible[i]; c->count = 1; break; }
}

void ng_read_settings(ng_config *c) {
    static const char *links[] = {"nvswitch", "nvlink", "p2p", "pcie", "host"};
    c->gpus = atoi(item("NULLGPU_DEVICES", "0", 0));
    if (c->gpus > NG_GPUS) c->gpus = NG_GPUS;
    if (sscanf(item("NULLGPU_CAPABILITY", "9.0", 0), "%d.%d", &c->major, &c->minor) != 2) c->major = 9, c->minor = 0;
    int generation = 10 * c->major + c->minor; /* what a multiprocessor holds */
    c->sm_threads = generation == 75 ? 1024 : (generation > 80 && generation < 90) || generation >= 110 ? 1536 : 2048;
    const char *link = item("NULLGPU_LINK", "nvswitch", 0);
    for (int i = 0; i < 5; i++) if (!strcmp(link, links[i])) c->link = i;
    c->context = ng_mib("NULLGPU_CONTEXT_MIB", 520);
    for (int i = 0; i < c->gpus; i++) gpu(c, i);
    instances(c);
    ng_read_visible(c);
}

/* What control.py can set for all processes, the environment sets for this one: "GPU:pid:MiB", "GPU:after[:times[:MiB]]", "GPU". */
void ng_read_own(ng_settings *own) {
    int number, pid, after;
    double mib;
    char list[1024];
    const char *text = getenv("NULLGPU_OTHERS");
    snprintf(list, sizeof list, "%s", text ? text : "");
    for (char *rest = list, *entry; (entry = strsep(&rest, ","));)
        if (sscanf(entry, "%d:%d:%lf", &number, &pid, &mib) == 3 && number >= 0 && number < NG_UNITS)
            for (int i = 0; i < NG_OTHERS; i++)
                if (!own[number].others[i].pid) { own[number].others[i] = (ng_other){pid, 0, (uint64_t)(mib * 1048576)}; break; }
    text = getenv("NULLGPU_FAIL");
    int times = 2; /* torch asks again after it has emptied its cache */
    mib = 0;
    if (text && sscanf(text, "%d:%d:%d:%lf", &number, &after, &times, &mib) >= 2 && number >= 0 && number < NG_UNITS)
        own[number].failing = (ng_failing){(uint64_t)(mib * 1048576), after, times};
    text = getenv("NULLGPU_LOST");
    snprintf(list, sizeof list, "%s", text ? text : "");
    for (char *rest = list, *entry; (entry = strsep(&rest, ","));)
        if (*entry && (number = atoi(entry)) >= 0 && number < NG_UNITS) own[number].error = 46; /* cudaErrorDevicesUnavailable */
}

static int named(const char *const *names, int count, const char *name, int otherwise) {
    for (int i = 0; i < count; i++) if (!strcmp(names[i], name)) return i;
    return otherwise;
}

/* "rank:kind:nth:action[:seconds]", "any" for the first two */
void ng_read_fault(ng_fault *fault) {
    static const char *kinds[] = {"send", "recv", "broadcast", "reduce", "all_reduce", "all_gather", "reduce_scatter", "all_to_all", "init"};
    static const char *actions[] = {"kill", "stop", "hang", "error"};
    char rank[16], kind[24], action[16];
    double seconds = 0;
    unsigned nth;
    const char *text = getenv("NULLGPU_FAULT");
    if (!text || sscanf(text, "%15[^:]:%23[^:]:%u:%15[^:]:%lf", rank, kind, &nth, action, &seconds) < 4) return;
    *fault = (ng_fault){.serial = 1, .rank = strcmp(rank, "any") ? atoi(rank) : -1, .kind = named(kinds, 9, kind, -1), .nth = nth,
                        .action = named(actions, 4, action, 0), .seconds = seconds};
}
