/* The compiler at run time: kernels that torch writes for its own operators (lgamma, digamma, complex numbers) compile to nothing, as those
   that come with torch do nothing here. Other sources don't compile: nobody would compute what they say. */
#define _GNU_SOURCE
#include <stdlib.h>
#include <string.h>

typedef struct { char *names[16]; int count, known; } program_t;

/* No release's, so that a cache of kernels never gives these to a GPU. */
int nvrtcVersion(int *major, int *minor) { *major = 99, *minor = 0; return 0; }
const char *nvrtcGetErrorString(int error) { return error ? "the stub compiles kernels of torch's own operators alone" : "no error"; }
int nvrtcCreateProgram(program_t **made, const char *source, const char *name, int count, const char *const *headers, const char *const *includes) {
    *made = calloc(1, sizeof **made);
    (*made)->known = strstr(source, "OffsetCalculator") != NULL;
    return 0;
}
int nvrtcDestroyProgram(program_t **program) {
    for (int i = 0; i < (*program)->count; i++) free((*program)->names[i]);
    free(*program);
    *program = NULL;
    return 0;
}
int nvrtcAddNameExpression(program_t *program, const char *name) {
    if (program->count == 16) return 1;
    program->names[program->count++] = strdup(name);
    return 0;
}
int nvrtcCompileProgram(program_t *program, int count, const char *const *options) { return program->known ? 0 : 6; }
int nvrtcGetLoweredName(program_t *program, const char *name, const char **lowered) {
    for (int i = 0; i < program->count; i++) if (!strcmp(program->names[i], name)) { *lowered = program->names[i]; return 0; }
    return 1;
}
int nvrtcGetProgramLogSize(program_t *program, size_t *bytes) { *bytes = 1; return 0; }
int nvrtcGetProgramLog(program_t *program, char *log) { *log = 0; return 0; }
int nvrtcGetPTXSize(program_t *program, size_t *bytes) { *bytes = 1; return 0; }
int nvrtcGetPTX(program_t *program, char *code) { *code = 0; return 0; }
int nvrtcGetCUBINSize(program_t *program, size_t *bytes) { return nvrtcGetPTXSize(program, bytes); }
int nvrtcGetCUBIN(program_t *program, char *code) { return nvrtcGetPTX(program, code); }
