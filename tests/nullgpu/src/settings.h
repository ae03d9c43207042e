/* What the environment says; see settings.c. */
#pragma once
#include "nullgpu.h"
void ng_read_settings(ng_config *config);
void ng_read_visible(ng_config *config);
void ng_read_own(ng_settings *own);
void ng_read_fault(ng_fault *fault);
