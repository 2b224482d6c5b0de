/* WW_TARGET_BEGIN("avx2") ... WW_TARGET_END: the functions between may use those instructions, whatever the rest is
 * built for. Only variants that asked the CPU first may be called. */
#ifndef WW_FNV1A_TARGET_H
#define WW_FNV1A_TARGET_H

#define WW_PRAGMA(text) _Pragma(#text)
#ifdef __clang__
#define WW_TARGET_BEGIN(isa) WW_PRAGMA(clang attribute push(__attribute__((target(isa))), apply_to = function))
#define WW_TARGET_END WW_PRAGMA(clang attribute pop)
#else
#define WW_TARGET_BEGIN(isa) WW_PRAGMA(GCC push_options) WW_PRAGMA(GCC target(isa))
#define WW_TARGET_END WW_PRAGMA(GCC pop_options)
#endif

#endif
