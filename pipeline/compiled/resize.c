/* pillow-simd's 8-bit resize as one plain C function, without PIL around it, and the sums of what it makes.

Coefficients and convolutions are pillow-simd's own code, which is included from its source, in its order, so the
pixels are those of its Image.resize(size, resample, box). What is ours is around them: packed RGB is read in place
(a quarter less memory than PIL's four bytes a pixel), a few rows at a time are widened to four bytes where the
convolution wants them, and each finished row is packed while it is in the cache, straight into the caller's array.

Built by pipeline/compiled/install.py, called through ctypes by pipeline/image/resize.py:
    cc -O2 -mavx2 -shared -fPIC -I pillow_simd-12.1.1.post0/src/libImaging -I pipeline/compiled resize.c -o resize.so -lm
*/

#include <stddef.h>
#include <stdint.h>
#include <string.h>

#include "Resample.c"

#define EXPORT __attribute__((visibility("default")))

/* Called by precompute_coeffs where memory is short; its caller sees the result, 0. */
void *
ImagingError_MemoryError(void) {
    return NULL;
}

/* The instruction set that the convolutions were compiled for. */
EXPORT const char *
simd_resize_instructions(void) {
#if defined(__AVX2__)
    return "avx2";
#else
    return "sse4";
#endif
}

/* Bytes of scratch memory for one call of simd_resize. */
EXPORT size_t
simd_resize_scratch(int width, int height, int out_width) {
    /* the filter may span all rows */
    return (size_t)height * sizeof(INT32 *) + ((size_t)out_width + 4 * (size_t)width + (size_t)height * out_width) * 4;
}

/* `pixels` of three bytes to four; the fourth is 0. Reads and writes nothing beyond them. */
static void
widen(uint8_t *out, const uint8_t *in, int pixels) {
    const __m128i order = _mm_set_epi8(-1, 11, 10, 9, -1, 8, 7, 6, -1, 5, 4, 3, -1, 2, 1, 0);
    int x = 0;
    for (; x < pixels - 5; x += 4) { /* 16 bytes are read for 12 */
        __m128i packed = _mm_loadu_si128((const __m128i *)(in + x * 3));
        _mm_storeu_si128((__m128i *)(out + x * 4), _mm_shuffle_epi8(packed, order));
    }
    for (; x < pixels; x++) {
        out[x * 4] = in[x * 3];
        out[x * 4 + 1] = in[x * 3 + 1];
        out[x * 4 + 2] = in[x * 3 + 2];
        out[x * 4 + 3] = 0;
    }
}

/* `pixels` of four bytes to three, or to their luma (ITU-R 601-2 as PIL's convert("L")). */
static void
narrow(uint8_t *out, const uint8_t *in, int pixels, int channels) {
    const __m128i order = _mm_set_epi8(-1, -1, -1, -1, 14, 13, 12, 10, 9, 8, 6, 5, 4, 2, 1, 0);
    int x = 0;
    if (channels == 1) {
        for (; x < pixels; x++, in += 4) {
            out[x] = (in[0] * 19595 + in[1] * 38470 + in[2] * 7471 + 0x8000) >> 16;
        }
        return;
    }
    for (; x < pixels - 5; x += 4) { /* 16 bytes are written for 12; the next step overwrites the rest */
        __m128i wide = _mm_loadu_si128((const __m128i *)(in + x * 4));
        _mm_storeu_si128((__m128i *)(out + x * 3), _mm_shuffle_epi8(wide, order));
    }
    for (; x < pixels; x++) {
        memcpy(out + x * 3, in + x * 4, 3);
    }
}

/* Resize a part of an image.

pixels: height rows of width * 3 bytes. box: left, top, right, bottom, inside the image. filter: PIL's number. out:
out_height rows of out_width * channels bytes (3 or 1), out_stride bytes apart. scratch: simd_resize_scratch bytes,
aligned to 8. Returns 0; 1 for a filter that isn't known; 2 where memory is short. */
EXPORT int
simd_resize(
    const uint8_t *pixels, int width, int height, float left, float top, float right, float bottom, int filter,
    int out_width, int out_height, int channels, uint8_t *out, ptrdiff_t out_stride, uint8_t *scratch
) {
    struct filter *kernel;
    struct ImagingMemoryInstance source = {0}; /* of the vertical pass */
    int *bounds_x, *bounds_y, ksize_x, ksize_y, y;
    double *kk_x, *kk_y;
    const size_t stride = (size_t)width * 3;
    INT32 **rows = (INT32 **)scratch;        /* what the vertical pass reads */
    UINT32 *line = (UINT32 *)(rows + height); /* one finished row */
    UINT32 *wide = line + out_width;         /* four source rows */
    UINT32 *temp = wide + 4 * (size_t)width; /* a ring of rows, resized horizontally */

    switch (filter) {
        case IMAGING_TRANSFORM_BOX:
            kernel = &BOX;
            break;
        case IMAGING_TRANSFORM_BILINEAR:
            kernel = &BILINEAR;
            break;
        case IMAGING_TRANSFORM_BICUBIC:
            kernel = &BICUBIC;
            break;
        case IMAGING_TRANSFORM_LANCZOS:
            kernel = &LANCZOS;
            break;
        default:
            return 1;
    }
    if (left == (int)left && top == (int)top && right - left == out_width && bottom - top == out_height) {
        for (y = 0; y < out_height; y++) { /* only a cut */
            widen((uint8_t *)line, pixels + ((size_t)top + y) * stride + (size_t)left * 3, out_width);
            narrow(out + y * out_stride, (uint8_t *)line, out_width, channels);
        }
        return 0;
    }

    ksize_x = precompute_coeffs(width, left, right, out_width, kernel, &bounds_x, &kk_x);
    if (!ksize_x) {
        return 2;
    }
    ksize_y = precompute_coeffs(height, top, bottom, out_height, kernel, &bounds_y, &kk_y);
    if (!ksize_y) {
        free(bounds_x);
        free(kk_x);
        return 2;
    }
    const int horizontal = out_width != width || left || right != out_width;
    const int vertical = out_height != height || top || bottom != out_height;
    const int first_row = bounds_y[0];
    const int num_rows = bounds_y[out_height * 2 - 2] + bounds_y[out_height * 2 - 1] - first_row;
    /* Only these columns are widened; `wide` is addressed as if all were there. */
    const int first = bounds_x[0];
    const int last = bounds_x[out_width * 2 - 2] + bounds_x[out_width * 2 - 1];

    /* The vertical pass follows the horizontal one closely, so that all between them stays in the nearest cache: a ring
    of as many rows as the vertical filter spans, and the up to four that are made at once. */
    const int ring = num_rows < ksize_y + 4 ? num_rows : ksize_y + 4;
    for (y = 0; y < num_rows; y++) {
        rows[y] = (INT32 *)(temp + (size_t)(y % ring) * out_width);
    }
    source.xsize = out_width;
    source.image32 = rows;
    pixels += (size_t)first_row * stride;
    const int precision_x = normalize_coeffs_8bpc(out_width, ksize_x, kk_x);
    const int precision_y = normalize_coeffs_8bpc(out_height, ksize_y, kk_y);
    UINT32 *w0 = wide, *w1 = w0 + width, *w2 = w1 + width, *w3 = w2 + width;
    int made = 0;
    for (y = 0; y < out_height; y++) {
        const int top_row = vertical ? bounds_y[y * 2] - first_row : y;
        const int count = vertical ? bounds_y[y * 2 + 1] : 1;
        while (made < top_row + count) {
            const uint8_t *in = pixels + made * stride + first * 3;
            if (!horizontal) {
                widen((uint8_t *)rows[made], pixels + made * stride, width);
                made += 1;
            } else if (made + 4 <= num_rows) {
                /* The rows after these come from a far cache while these are worked on. */
                for (size_t at = 0; at < 4 * stride; at += 64) {
                    _mm_prefetch((const char *)in + 4 * stride + at, _MM_HINT_T0);
                }
                widen((uint8_t *)(w0 + first), in, last - first);
                widen((uint8_t *)(w1 + first), in + stride, last - first);
                widen((uint8_t *)(w2 + first), in + 2 * stride, last - first);
                widen((uint8_t *)(w3 + first), in + 3 * stride, last - first);
                ImagingResampleHorizontalConvolution8u4x(
                    (UINT32 *)rows[made], (UINT32 *)rows[made + 1], (UINT32 *)rows[made + 2], (UINT32 *)rows[made + 3],
                    w0, w1, w2, w3, out_width, bounds_x, (INT16 *)kk_x, ksize_x, precision_x
                );
                made += 4;
            } else {
                widen((uint8_t *)(w0 + first), in, last - first);
                ImagingResampleHorizontalConvolution8u(
                    (UINT32 *)rows[made], w0, out_width, bounds_x, (INT16 *)kk_x, ksize_x, precision_x
                );
                made += 1;
            }
        }
        uint8_t *row = (uint8_t *)rows[top_row];
        if (vertical) {
            row = (uint8_t *)line;
            ImagingResampleVerticalConvolution8u(
                line, &source, top_row, count, (INT16 *)kk_y + y * ksize_y, precision_y
            );
        }
        narrow(out + y * out_stride, row, out_width, channels);
    }
    free(bounds_x);
    free(kk_x);
    free(bounds_y);
    free(kk_y);
    return 0;
}

/* The sums of some blocks of 16 pixels, at most 8,192: a block adds at most 4 * 255^2 to a lane of 32 bits. Inline, so
that the compiler knows the channels and keeps all sums in registers. */
static inline __attribute__((always_inline)) void
add_blocks(const uint8_t *in, size_t blocks, int channels, uint64_t *out) {
    const __m128i zero = _mm_setzero_si128();
    /* of every three bytes the second, and the third */
    const __m128i second = _mm_set_epi8(0, 0, -1, 0, 0, -1, 0, 0, -1, 0, 0, -1, 0, 0, -1, 0);
    const __m128i third = _mm_set_epi8(0, -1, 0, 0, -1, 0, 0, -1, 0, 0, -1, 0, 0, -1, 0, 0);
    __m128i sums[3] = {zero, zero, zero}, squares[3] = {zero, zero, zero};
    for (; blocks; blocks--, in += 16 * channels) {
        __m128i bytes[3];
        bytes[0] = _mm_loadu_si128((const __m128i *)in);
        if (channels == 3) {
            /* A channel's 16 bytes stand at other places in each of the three vectors, so that they mix without being
            moved; their order doesn't matter. */
            const __m128i a = bytes[0];
            const __m128i b = _mm_loadu_si128((const __m128i *)(in + 16));
            const __m128i c = _mm_loadu_si128((const __m128i *)(in + 32));
            bytes[0] = _mm_blendv_epi8(_mm_blendv_epi8(a, b, third), c, second);
            bytes[1] = _mm_blendv_epi8(_mm_blendv_epi8(b, c, third), a, second);
            bytes[2] = _mm_blendv_epi8(_mm_blendv_epi8(c, a, third), b, second);
        }
#pragma GCC unroll 3
        for (int channel = 0; channel < channels; channel++) {
            const __m128i low = _mm_unpacklo_epi8(bytes[channel], zero);
            const __m128i high = _mm_unpackhi_epi8(bytes[channel], zero);
            const __m128i square = _mm_add_epi32(_mm_madd_epi16(low, low), _mm_madd_epi16(high, high));
            sums[channel] = _mm_add_epi64(sums[channel], _mm_sad_epu8(bytes[channel], zero));
            squares[channel] = _mm_add_epi32(squares[channel], square);
        }
    }
    for (int channel = 0; channel < channels; channel++) {
        uint64_t sum[2];
        uint32_t square[4];
        _mm_storeu_si128((__m128i *)sum, sums[channel]);
        _mm_storeu_si128((__m128i *)square, squares[channel]);
        out[channel] += sum[0] + sum[1];
        out[channels + channel] += (uint64_t)square[0] + square[1] + square[2] + square[3];
    }
}

/* Sums and sums of squares per channel of `count` pixels of 1 or 3 bytes: out[channel], out[channels + channel]. */
EXPORT void
simd_channel_sums(const uint8_t *in, size_t count, int channels, uint64_t *out) {
    size_t rest = count % 16;
    memset(out, 0, 2 * channels * sizeof(uint64_t));
    for (size_t blocks = count / 16, now; blocks; blocks -= now, in += now * 16 * channels) {
        now = blocks < 8192 ? blocks : 8192;
        if (channels == 3) {
            add_blocks(in, now, 3, out);
        } else {
            add_blocks(in, now, 1, out);
        }
    }
    for (; rest; rest--, in += channels) {
        for (int channel = 0; channel < channels; channel++) {
            out[channel] += in[channel];
            out[channels + channel] += (uint64_t)in[channel] * in[channel];
        }
    }
}
