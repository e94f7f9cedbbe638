// The loader compares it with that of vllm/native/structs.py. To be raised whenever a struct or a function
// of vllm_native.h or towers.h changes, or what one expects of its caller. In a file of its own, so that
// raising it compiles one file.
#pragma once

#define VN_ABI_VERSION 29
