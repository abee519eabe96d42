// What the networks share: LANES samples as one vector, and the loss.

#pragma once
#include <cmath>
#include <cstdint>
#include <cstring>
#ifdef __AVX2__
#include <immintrin.h>
#endif

#if defined __AVX512F__
constexpr int LANES = 16, BLOCK = 4;
#elif defined __AVX2__
constexpr int LANES = 8, BLOCK = 2;
#else  // NEON and SSE2 among others
constexpr int LANES = 4, BLOCK = 4;
#endif
constexpr int GROUP = 8;  // independent sums, so that no addition waits for the one before
#define EACH(j, n) _Pragma("GCC unroll 32") for (int j = 0; j < n; j++)

typedef float V __attribute__((vector_size(4 * LANES)));
typedef int32_t I __attribute__((vector_size(4 * LANES)));
typedef float Unaligned __attribute__((vector_size(4 * LANES), aligned(4)));

struct Tap { int at; float w; };  // a weight that is not zero or whose gradient is needed, and its place

// One bit per lane: which of LANES numbers are not zero.
static inline uint32_t nonzeros(const float *from) {
    uint32_t bits = 0;
#if defined __AVX512F__
    bits = _mm512_cmp_ps_mask(_mm512_loadu_ps(from), _mm512_setzero_ps(), _CMP_NEQ_UQ);
#elif defined __AVX2__
    bits = _mm256_movemask_ps(_mm256_cmp_ps(_mm256_loadu_ps(from), _mm256_setzero_ps(), _CMP_NEQ_UQ));
#else
    for (int l = 0; l < LANES; l++) bits |= uint32_t(from[l] != 0) << l;
#endif
    return bits;
}

static float sum(V v) {
    float s = 0;
    for (int l = 0; l < LANES; l++) s += v[l];
    return s;
}

template <int N>
static void relu(V *v) {
    for (int i = 0; i < N; i++) v[i] = v[i] < 0 ? V{} : v[i];
}

// The summed cross-entropy of one tile; d = (softmax − one-hot) · scale, and 0 for lanes without a sample.
// A class's logits are STEP vectors from the next one's.
template <int N, int STEP>
static double cross_entropy(const V *logits, V *d, const int64_t *y, int samples, float scale) {
    double loss = 0;
    for (int l = 0; l < LANES; l++) {
        float top = logits[0][l], total = 0, p[N];
        for (int k = 1; k < N; k++) top = std::fmax(top, logits[k * STEP][l]);
        for (int k = 0; k < N; k++) total += p[k] = std::exp(logits[k * STEP][l] - top);
        const bool real = l < samples;
        for (int k = 0; k < N; k++) d[k * STEP][l] = real ? (p[k] / total - (k == y[l])) * scale : 0;
        if (real) loss += std::log(total) + top - logits[y[l] * STEP][l];
    }
    return loss;
}
