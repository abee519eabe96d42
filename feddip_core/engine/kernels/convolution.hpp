// 3×3 convolutions and max-pools, on up to TILES tiles.

#pragma once
#include "tiles.hpp"

// A 3×3 convolution to N×N outputs. With stride 1 the image has no margin; with stride 2 it has one above and left.
template <int CIN, int COUT, int N, int STRIDE = 1>
struct Conv {
    static constexpr int K = CIN * 9, W = STRIDE == 2 ? 2 * N + 1 : N, IN = W * W, OUT = N * N, B = ROOM / 4;
    static constexpr int X = N < ROOM ? N : ROOM, R = STRIDE == 2 ? 1 : ROOM / X < N ? ROOM / X : N;

    // The weights by output, then by group of inputs that fits the L1 cache, then by place, then by input.
    template <int TO, int FROM>
    struct Taps {
        static constexpr int PARTS = STRIDE == 2 ? 1 : (FROM * OUT - 1) / 512 + 1, PART = (FROM - 1) / PARTS + 1;
        Tap list[TO][FROM * 9];
        int end[TO][PARTS][9];
    };

    Taps<COUT, CIN> taps;
    Taps<CIN, COUT> back;
    int all;
    bool sparse;  // whether only the taps get a gradient
    V sums[B][K + LANES];

    struct Taken { float w; bool taken; };

    template <int TO, int FROM, class F>
    static int sort(Taps<TO, FROM> &taps, int to, int size, F weight) {
        int n = 0;
        for (int part = 0; part < taps.PARTS; part++)
            for (int p = 0; p < 9; taps.end[to][part][p++] = n)
                for (int i = part * taps.PART; i < FROM && i < (part + 1) * taps.PART; i++) {
                    const Taken one = weight(i, p);
                    taps.list[to][n] = {i * size, one.w};
                    n += one.taken;
                }
        return n;
    }

    void read(const float *w, const float *wanted) {
        all = 0;
        for (int c = 0; c < COUT; c++)
            all += sort(taps, c, IN, [&](int i, int p) {
                const int k = c * K + i * 9 + p;
                return Taken{w[k], w[k] != 0 || (wanted && wanted[k] != 0)};
            });
        // The gradient of the input is a convolution with the kernel turned round.
        for (int i = 0; i < CIN && STRIDE == 1; i++)
            sort(back, i, OUT, [&](int c, int p) {
                const float value = w[c * K + i * 9 + 8 - p];
                return Taken{value, value != 0};
            });
        sparse = wanted && all < COUT * K * 3 / 4;
    }

    static constexpr bool inside(int at, int k, bool first = true, bool last = true, int n = N) {
        return STRIDE == 2 || !((first && at + k < 1) || (last && at + k > n));
    }

    static constexpr int from(int y, int x, int p) {
        return STRIDE == 2 ? (2 * y + p / 3) * W + 2 * x + p % 3 : (y + p / 3 - 1) * W + x + p % 3 - 1;
    }

    template <bool FIRST, bool LAST>
    static INLINE inline void rows(const Tap *list, const int (*end)[9], int parts, const V *in, V b, V *out,
                                   bool relu) {
        V sums[R * X];
        EACH(j, R * X) sums[j] = b;
        const Tap *tap = list;
        for (int part = 0; part < parts; part++) PLACES([&](auto place) INLINE {
            constexpr int P = place;
            for (; tap < list + end[part][P]; tap++) {
                const V *at = in + tap->at, w = tap->w - V{};
                EACH(j, R * X)
                    if (inside(j / X, P / 3, FIRST, LAST, R) && inside(j % X, P % 3))
                        sums[j] += at[from(j / X, j % X, P)] * w;
            }
        });
        EACH(j, R * X) out[j / X * N + j % X] = relu && sums[j] < 0 ? V{} : sums[j];
    }

    // out[c][y][x] = b[c] + Σ w[c][i][ky][kx] · in[i][y+ky][x+kx]
    template <class T>
    static void apply(const T &taps, int outputs, const V *in, const float *b, V *out, bool relu) {
        for (int c = 0; c < outputs; c++)
            for (int y = 0; y < N; y += R)
                for (int x = 0; x < N; x += X) {
                    const V *corner = in + STRIDE * (y * W + x), bias = (b ? b[c] : 0) - V{};
                    V *to = out + (c * N + y) * N + x;
                    const Tap *list = taps.list[c];
                    const auto end = taps.end[c];
                    if (STRIDE == 2) rows<false, false>(list, end, taps.PARTS, corner, bias, to, relu);
                    else if (R == N) rows<true, true>(list, end, taps.PARTS, corner, bias, to, relu);
                    else if (y == 0) rows<true, false>(list, end, taps.PARTS, corner, bias, to, relu);
                    else if (y == N - R) rows<false, true>(list, end, taps.PARTS, corner, bias, to, relu);
                    else rows<false, false>(list, end, taps.PARTS, corner, bias, to, relu);
                }
    }

    void forward(const V *in, const float *b, V *out, bool relu) const { apply(taps, COUT, in, b, out, relu); }
    void input_gradient(const V *dz, V *din) const { apply(back, CIN, dz, nullptr, din, false); }

    // dw[c][i][ky][kx] += Σ dz[c][y][x] · in[i][y+ky][x+kx] over all tiles, which are `step` vectors apart
    void gradient(const V *in, const V *dz, int step, int tiles, float *dw, float *db) {
        for (int c = 0; c < COUT; c++) {
            V s = {};
            for (int t = 0; t < tiles; t++) for (int x = 0; x < OUT; x++) s += dz[t * step + c * OUT + x];
            db[c] += sum(s);
        }
        if (sparse)
            for (int c = 0; c < COUT; c++) of_taps(in, dz + c * OUT, step, tiles, c, dw + c * K);
        else
            for (int c = 0; c < COUT; c += B) of_all(in, dz, step, tiles, c, dw);
    }

    void of_all(const V *in, const V *dz, int step, int tiles, int first, float *dw) {
        const V *own[B];
        EACH(c, B) own[c] = dz + (first + c < COUT ? first + c : COUT - 1) * OUT;
        for (int i = 0; i < CIN; i++)
            each([&](auto row) INLINE {
                constexpr int KY = row, FROM = STRIDE == 1 && KY == 0, TO = STRIDE == 1 && KY == 2 ? N - 1 : N;
                V s[B][3] = {};
                for (int t = 0; t < tiles; t++)
                    for (int y = FROM; y < TO; y++) {
                        const V *at = in + t * step + i * IN + from(y, 0, KY * 3 + 1);
                        EACH(x, N) EACH(c, B) {
                            const V d = own[c][t * step + y * N + x];
                            EACH(k, 3) if (inside(x, k)) s[c][k] += d * at[STRIDE * x + k - 1];
                        }
                    }
                EACH(c, B) EACH(k, 3) sums[c][i * 9 + KY * 3 + k] = s[c][k];
            }, std::make_integer_sequence<int, 3>{});
        for (int c = 0; c < B && first + c < COUT; c++) add_sums(sums[c], K, dw + (first + c) * K);
    }

    void of_taps(const V *in, const V *dz, int step, int tiles, int c, float *dw) {
        constexpr int G = 4;
        int which[K + LANES], n = 0, begin = 0;
        for (int part = 0; part < taps.PARTS; part++) PLACES([&](auto place) INLINE {
            constexpr int P = place, KY = P / 3, KX = P % 3;
            constexpr int FROM = STRIDE == 1 && KY == 0, TO = STRIDE == 1 && KY == 2 ? N - 1 : N;
            const int end = taps.end[c][part][P];
            for (int t = begin; t < end; t += G) {
                V s[G] = {};
                const V *own[G];
                EACH(j, G) own[j] = in + taps.list[c][t + j < end ? t + j : t].at;
                for (int tile = 0; tile < tiles; tile++)
                    for (int y = FROM; y < TO; y++)
                        EACH(x, N) if (inside(x, KX)) {
                            const V d = dz[tile * step + y * N + x];
                            EACH(j, G) s[j] += d * own[j][tile * step + from(y, x, P)];
                        }
                for (int j = 0; j < G && t + j < end; j++) {
                    which[n] = taps.list[c][t + j].at / IN * 9 + P;
                    sums[0][n++] = s[j];
                }
            }
            begin = end;
        });
        float found[K + LANES] = {};
        add_sums(sums[0], n, found);
        for (int j = 0; j < n; j++) dw[which[j]] += found[j];
    }
};

// The largest of each 2×2 of ReLU(z), and which one it was, for C channels.
template <int C, int N>
static void pool(const V *z, V *out, I *where, int step = 1) {
    for (int y = 0; y < C * N; y += 2)
        for (int x = 0; x < N; x += 2, out += step) {
            const V *at = z + y * N + x;
            V best = *at;
            I which = {};
            EACH(k, 3) {
                const V other = at[(k + 1) / 2 * N + (k + 1) % 2];
                which = other > best ? I{} + k + 1 : which;
                best = other > best ? other : best;
            }
            *out = best < 0 ? V{} : best;  // in this form a NaN stays NaN
            *where++ = which;
        }
}

// The gradient before the ReLU and the max-pool, from the one after them.
template <int C, int N>
static void unpool(const V *grad, const V *pooled, const I *where, V *dz, int step = 1) {
    for (int y = 0; y < C * N; y += 2)
        for (int x = 0; x < N; x += 2, grad += step, pooled += step, where++) {
            const V g = *pooled > 0 ? *grad : V{};
            EACH(k, 4) dz[(y + k / 2) * N + x + k % 2] = *where == k ? g : V{};
        }
}
