/* Copies a batch's crops out of memory maps. trainer/reading/copy_crops.py says what makes it fast, and checks the
arguments. */
#include <stdint.h>
#include <string.h>
#include <sys/mman.h>
#ifdef __SSE2__
#include <immintrin.h>
#endif

#define EXPORT __attribute__((visibility("default")))
#define INLINE static inline __attribute__((always_inline))
#define LANES 4

/* Store `width` bytes, a constant, at a place aligned to it: past the cache, where the processor can. */
INLINE void
stream(uint8_t *to, const uint8_t *from, int width) {
#ifdef __SSE2__
    if (width == 8) {
        long long word;
        memcpy(&word, from, 8);
        _mm_stream_si64((long long *)to, word);
        return;
    }
#ifdef __AVX__
    if (width == 32) {
        _mm256_stream_si256((__m256i *)to, _mm256_loadu_si256((const __m256i *)from));
        return;
    }
#endif
    for (int at = 0; at < width; at += 16) {
        _mm_stream_si128((__m128i *)(to + at), _mm_loadu_si128((const __m128i *)(from + at)));
    }
#else
    memcpy(to, from, width);
#endif
}

/* Copy a row of each image in vectors of `width` bytes: four loads, then four stores. */
INLINE void
copy_rows(uint8_t *const *to, const uint8_t *const *from, int64_t row_bytes, int width, int aligned) {
    const int64_t whole = row_bytes / width * width;
    for (int64_t at = 0; at < whole; at += width) {
        uint8_t vectors[LANES][32];
#pragma GCC unroll 4
        for (int lane = 0; lane < LANES; lane++) {
            memcpy(vectors[lane], from[lane] + at, width);
        }
#pragma GCC unroll 4
        for (int lane = 0; lane < LANES; lane++) {
            if (aligned) {
                stream(to[lane] + at, vectors[lane], width);
            } else {
                memcpy(to[lane] + at, vectors[lane], width);
            }
        }
    }
#pragma GCC unroll 4
    for (int lane = 0; lane < LANES && !aligned; lane++) {
        memcpy(to[lane] + whole, from[lane] + whole, row_bytes - whole);
    }
}

/* Copy one crop per image.

    sources     where each crop begins, `count` of them
    out         count * rows * row_bytes bytes, end to end
    stride      bytes from one row of a source to the next
    stagger     rows by which each of LANES images is ahead of the one before; (LANES - 1) * stagger < rows
*/
EXPORT void
copy_crops(
    const uint8_t *const *sources, int64_t count, uint8_t *out, int64_t rows, int64_t row_bytes, int64_t stride,
    int64_t stagger
) {
    const uintptr_t align = (uintptr_t)out | (uintptr_t)row_bytes;
    for (int64_t first = 0; first < count; first += LANES) {
        const uint8_t *crop[LANES];
        uint8_t *place[LANES];
        for (int lane = 0; lane < LANES; lane++) {
            /* The last group repeats the last image where the count is no multiple. */
            const int64_t image = first + lane < count ? first + lane : count - 1;
            crop[lane] = sources[image];
            place[lane] = out + image * rows * row_bytes;
        }
        for (int64_t row = 0; row < rows; row++) {
            const uint8_t *from[LANES];
            uint8_t *to[LANES];
#pragma GCC unroll 4
            for (int lane = 0; lane < LANES; lane++) {
                const int64_t ahead = row + lane * stagger;
                const int64_t own_row = ahead < rows ? ahead : ahead - rows;
                from[lane] = crop[lane] + own_row * stride;
                to[lane] = place[lane] + own_row * row_bytes;
            }
            if (align % 32 == 0) {
                copy_rows(to, from, row_bytes, 32, 1);
            } else if (align % 16 == 0) {
                copy_rows(to, from, row_bytes, 16, 1);
            } else if (align % 8 == 0) {
                copy_rows(to, from, row_bytes, 8, 1);
            } else {
                copy_rows(to, from, row_bytes, 32, 0);
            }
        }
    }
#ifdef __SSE2__
    _mm_sfence(); /* the batch is complete for whoever reads it next */
#endif
}

/* madvise for many ranges; what the kernel refuses is left undone. */
EXPORT void
advise(const uintptr_t *starts, const size_t *lengths, int64_t count, int advice) {
    for (int64_t i = 0; i < count; i++) {
        madvise((void *)starts[i], lengths[i], advice);
    }
}
