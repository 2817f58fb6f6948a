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

/* The filter weights that make out_size pixels of in_size along one axis, from `start` to `end`.

filter: PIL's number. bounds: 2 * out_size numbers, for each pixel the first of its source pixels, counted from the
first one that is used at all, and how many they are. weights: out_size * K numbers, of which `room` have room. used:
the first source pixel, the number of source pixels from it to the last one, and the binary digits of a weight behind
the point. Returns K, the weights per pixel; 0 where memory or room is short, and -1 where there is no such filter. */
EXPORT int
simd_weights(
    int in_size, float start, float end, int out_size, int filter, int *bounds, INT16 *weights, size_t room, int *used
) {
    struct filter *kernels[] = {
        [IMAGING_TRANSFORM_BOX] = &BOX,
        [IMAGING_TRANSFORM_BILINEAR] = &BILINEAR,
        [IMAGING_TRANSFORM_BICUBIC] = &BICUBIC,
        [IMAGING_TRANSFORM_LANCZOS] = &LANCZOS,
    };
    if (filter < 0 || filter >= (int)(sizeof kernels / sizeof *kernels) || !kernels[filter]) {
        return -1;
    }
    int *all_bounds;
    double *all_weights;
    int count = precompute_coeffs(in_size, start, end, out_size, kernels[filter], &all_bounds, &all_weights);
    if (!count) {
        return 0;
    }
    if ((size_t)out_size * count > room) {
        count = 0;
    } else {
        const int first = all_bounds[0];
        used[0] = first;
        used[1] = all_bounds[out_size * 2 - 2] + all_bounds[out_size * 2 - 1] - first;
        used[2] = normalize_coeffs_8bpc(out_size, count, all_weights);
        memcpy(weights, all_weights, (size_t)out_size * count * sizeof(INT16));
        for (int x = 0; x < out_size; x++) {
            bounds[x * 2] = all_bounds[x * 2] - first;
            bounds[x * 2 + 1] = all_bounds[x * 2 + 1];
        }
    }
    free(all_bounds);
    free(all_weights);
    return count;
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

/* One axis of a resize: what simd_weights made, K, and whether anything is to be done along it. */
struct axis {
    const int *bounds;
    const INT16 *weights;
    int count, first, length, precision, changes;
};

/* `height` rows of `width` pixels out of an image without a change, rows `stride` bytes apart. */
EXPORT int
simd_cut(
    const uint8_t *pixels, size_t stride, int width, int height, int channels, uint8_t *out, ptrdiff_t out_stride
) {
    uint8_t *line = malloc((size_t)width * 4);
    if (!line) {
        return 1;
    }
    for (int y = 0; y < height; y++) {
        widen(line, pixels + y * stride, width);
        narrow(out + y * out_stride, line, width, channels);
    }
    free(line);
    return 0;
}

/* Resize a part of an image.

pixels: rows of three bytes a pixel, `stride` bytes apart. out: out_height rows of out_width * channels bytes (3 or 1),
out_stride bytes apart. Returns 0, or 1 where memory is short. */
EXPORT int
simd_resize(
    const uint8_t *pixels, size_t stride, const struct axis *x, const struct axis *y, int out_width, int out_height,
    int channels, uint8_t *out, ptrdiff_t out_stride
) {
    /* The vertical pass follows the horizontal one closely, so that all between them stays in the nearest cache: a ring
    of as many rows as the vertical filter spans, and the up to four that are made at once. */
    const int num_rows = y->length, ring = num_rows < y->count + 4 ? num_rows : y->count + 4;
    const size_t row_pixels = x->changes ? (size_t)out_width : (size_t)x->length;
    const size_t scratch_pixels = out_width + 4 * (size_t)x->length + ring * row_pixels + 16;
    INT32 **rows = malloc(num_rows * sizeof(INT32 *) + scratch_pixels * 4); /* what the vertical pass reads */
    if (!rows) {
        return 1;
    }
    UINT32 *line = (UINT32 *)(rows + num_rows); /* one finished row */
    UINT32 *w0 = line + out_width, *w1 = w0 + x->length, *w2 = w1 + x->length, *w3 = w2 + x->length; /* source rows */
    UINT32 *made_rows = w3 + x->length;
    for (int row = 0; row < num_rows; row++) {
        rows[row] = (INT32 *)(made_rows + (row % ring) * row_pixels);
    }
    struct ImagingMemoryInstance source = {0};
    source.xsize = out_width;
    source.image32 = rows;
    pixels += y->first * stride + (size_t)x->first * 3;
    int made = 0;
    for (int out_row = 0; out_row < out_height; out_row++) {
        const int top = y->changes ? y->bounds[out_row * 2] : out_row;
        const int count = y->changes ? y->bounds[out_row * 2 + 1] : 1;
        while (made < top + count) {
            const uint8_t *in = pixels + made * stride;
            if (!x->changes) {
                widen((uint8_t *)rows[made], in, x->length);
                made += 1;
            } else if (made + 4 <= num_rows) {
                /* The rows after these come from a far cache while these are worked on. */
                for (size_t at = 0; at < 4 * stride; at += 64) {
                    _mm_prefetch((const char *)in + 4 * stride + at, _MM_HINT_T0);
                }
                widen((uint8_t *)w0, in, x->length);
                widen((uint8_t *)w1, in + stride, x->length);
                widen((uint8_t *)w2, in + 2 * stride, x->length);
                widen((uint8_t *)w3, in + 3 * stride, x->length);
                ImagingResampleHorizontalConvolution8u4x(
                    (UINT32 *)rows[made], (UINT32 *)rows[made + 1], (UINT32 *)rows[made + 2], (UINT32 *)rows[made + 3],
                    w0, w1, w2, w3, out_width, (int *)x->bounds, (INT16 *)x->weights, x->count, x->precision
                );
                made += 4;
            } else {
                widen((uint8_t *)w0, in, x->length);
                ImagingResampleHorizontalConvolution8u(
                    (UINT32 *)rows[made], w0, out_width, (int *)x->bounds, (INT16 *)x->weights, x->count, x->precision
                );
                made += 1;
            }
        }
        uint8_t *row = (uint8_t *)rows[top];
        if (y->changes) {
            row = (uint8_t *)line;
            ImagingResampleVerticalConvolution8u(
                line, &source, top, count, (INT16 *)y->weights + out_row * y->count, y->precision
            );
        }
        narrow(out + out_row * out_stride, row, out_width, channels);
    }
    free(rows);
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
