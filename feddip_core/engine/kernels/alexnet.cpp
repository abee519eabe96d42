// Cross-entropy of AlexNet and its gradient, for one batch, in single precision.
//
// As in LeNet-5, samples stand side by side as the innermost axis, LANES to a tile. Up to TILES tiles pass a layer
// together, so that the sums of a weight's gradient stay in registers. Of a 3×3 kernel's nine places each has its own
// loop, which knows at compile time where the image ends: the zeros around it are never multiplied. Convolutions, and
// linear layers with many zeros, visit only the nonzero weights, forward and backward. With a mask, gradients are
// computed only for the weights that it keeps. Neither changes the order of a sum, so the bits are the same.
//
// Shapes come as macros: CHANNELS (of a 32×32 image), C1 to C4 (channels), H (hidden units), CLASSES.

#include "convolution.hpp"
#include "linear.hpp"

constexpr int SIZE = 32, W1 = SIZE + 1, FEATURES = C4 * 4;

static void relu_gradient(V *d, const V *out, int n, float scale = 1) {
    for (int i = 0; i < n; i++) d[i] = out[i] > 0 ? d[i] * scale : V{};
}

struct Sizes {
    static constexpr int w1 = 0, b1 = w1 + C1 * CHANNELS * 9, w2 = b1 + C1, b2 = w2 + C2 * C1 * 9, w3 = b2 + C2,
        b3 = w3 + C3 * C2 * 9, w4 = b3 + C3, b4 = w4 + C4 * C3 * 9, w5 = b4 + C4, b5 = w5 + C4 * C4 * 9,
        w6 = b5 + C4, b6 = w6 + H * FEATURES, w7 = b6 + H, b7 = w7 + H * H, w8 = b7 + H, b8 = w8 + CLASSES * H,
        all = b8 + CLASSES;
};

struct Layers {
    Conv<CHANNELS, C1, 16, 2> conv1;
    Conv<C1, C2, 8> conv2;
    Conv<C2, C3, 4> conv3;
    Conv<C3, C4, 4> conv4;
    Conv<C4, C4, 4> conv5;
    Linear<H, FEATURES> fc1;
    Linear<H, H> fc2;
    Linear<CLASSES, H> fc3;

    void read(const float *u, const float *mask) {
        const auto read = [&](auto &layer, int at) { layer.read(u + at, mask ? mask + at : nullptr); };
        read(conv1, Sizes::w1), read(conv2, Sizes::w2), read(conv3, Sizes::w3), read(conv4, Sizes::w4);
        read(conv5, Sizes::w5), read(fc1, Sizes::w6), read(fc2, Sizes::w7), read(fc3, Sizes::w8);
    }
};

struct Tile {
    V image[CHANNELS * W1 * W1], a1[C1 * 64], a2[C2 * 16], a3[C3 * 16], a4[C4 * 16];
    V z1[C1 * 256], z2[C2 * 64], z3[C3 * 16], z4[C4 * 16], z5[C4 * 16], d1[C1 * 64], d2[C2 * 16];
    I where1[C1 * 64], where2[C2 * 16], where5[FEATURES];
};
constexpr int STEP = sizeof(Tile) / sizeof(V);

struct Workspace {
    Tile tiles[TILES];
    V a5[FEATURES * TILES], a6[H * TILES], a7[H * TILES], logits[CLASSES * TILES];
    V d5[FEATURES * TILES], d6[H * TILES], d7[H * TILES], d8[CLASSES * TILES];
    Layers layers;
};

// What a dropout keeps, times 2; without one, everything.
static void drop(V *v, int units, const float *kept, int samples) {
    for (int s = 0, t = 0; kept && s < samples; s += LANES, t++)
        each_number(kept + s * units, units, samples - s, units, [&](int k, V times) { v[k * TILES + t] *= times; });
}

static void forward(Workspace &space, const float *u, const float *x, const float *kept5, const float *kept6,
                    int samples) {
    auto &layers = space.layers;
    const int tiles = (samples + LANES - 1) / LANES;
    for (int t = 0; t < tiles; t++, x += LANES * CHANNELS * SIZE * SIZE) {
        Tile &tile = space.tiles[t];
        for (int row = 0; row < CHANNELS * SIZE; row++) {
            V *to = tile.image + (row / SIZE * W1 + row % SIZE + 1) * W1 + 1;
            const auto put = [&](int k, V v) { to[k] = v; };
            each_number(x + row * SIZE, CHANNELS * SIZE * SIZE, samples - t * LANES, SIZE, put);
        }
        layers.conv1.forward(tile.image, u + Sizes::b1, tile.z1, false);
        pool<C1, 16>(tile.z1, tile.a1, tile.where1);
        layers.conv2.forward(tile.a1, u + Sizes::b2, tile.z2, false);
        pool<C2, 8>(tile.z2, tile.a2, tile.where2);
        layers.conv3.forward(tile.a2, u + Sizes::b3, tile.a3, true);
        layers.conv4.forward(tile.a3, u + Sizes::b4, tile.a4, true);
        layers.conv5.forward(tile.a4, u + Sizes::b5, tile.z5, false);
        pool<C4, 4>(tile.z5, space.a5 + t, tile.where5, TILES);
    }
    drop(space.a5, FEATURES, kept5, samples);
    layers.fc1.forward(space.a5, u + Sizes::w6, u + Sizes::b6, space.a6, tiles);
    relu<H * TILES>(space.a6);
    drop(space.a6, H, kept6, samples);
    layers.fc2.forward(space.a6, u + Sizes::w7, u + Sizes::b7, space.a7, tiles);
    relu<H * TILES>(space.a7);
    layers.fc3.forward(space.a7, u + Sizes::w8, u + Sizes::b8, space.logits, tiles);
}

static void backward(Workspace &space, const float *u, float *g, float scale, int tiles) {
    auto &layers = space.layers;
    Tile &first = space.tiles[0];
    layers.fc3.gradient(space.a7, space.d8, tiles, g + Sizes::w8, g + Sizes::b8);
    layers.fc3.input_gradient(space.d8, u + Sizes::w8, space.d7, tiles);
    relu_gradient(space.d7, space.a7, H * TILES);
    layers.fc2.gradient(space.a6, space.d7, tiles, g + Sizes::w7, g + Sizes::b7);
    layers.fc2.input_gradient(space.d7, u + Sizes::w7, space.d6, tiles);
    relu_gradient(space.d6, space.a6, H * TILES, scale);  // what was dropped is 0, like what ReLU made 0
    layers.fc1.gradient(space.a5, space.d6, tiles, g + Sizes::w6, g + Sizes::b6);
    layers.fc1.input_gradient(space.d6, u + Sizes::w6, space.d5, tiles);
    relu_gradient(space.d5, space.a5, FEATURES * TILES, scale);
    for (int t = 0; t < tiles; t++) {
        Tile &tile = space.tiles[t];
        unpool<C4, 4>(space.d5 + t, space.a5 + t, tile.where5, tile.z5, TILES);
        layers.conv5.input_gradient(tile.z5, tile.z4);
        relu_gradient(tile.z4, tile.a4, C4 * 16);
        layers.conv4.input_gradient(tile.z4, tile.z3);
        relu_gradient(tile.z3, tile.a3, C3 * 16);
        layers.conv3.input_gradient(tile.z3, tile.d2);
        unpool<C2, 8>(tile.d2, tile.a2, tile.where2, tile.z2);
        layers.conv2.input_gradient(tile.z2, tile.d1);
        unpool<C1, 16>(tile.d1, tile.a1, tile.where1, tile.z1);
    }
    layers.conv5.gradient(first.a4, first.z5, STEP, tiles, g + Sizes::w5, g + Sizes::b5);
    layers.conv4.gradient(first.a3, first.z4, STEP, tiles, g + Sizes::w4, g + Sizes::b4);
    layers.conv3.gradient(first.a2, first.z3, STEP, tiles, g + Sizes::w3, g + Sizes::b3);
    layers.conv2.gradient(first.a1, first.z2, STEP, tiles, g + Sizes::w2, g + Sizes::b2);
    layers.conv1.gradient(first.image, first.z1, STEP, tiles, g + Sizes::w1, g + Sizes::b1);
}

extern "C" {

int64_t workspace_bytes() { return sizeof(Workspace); }
int parameters() { return Sizes::all; }

// The mean cross-entropy; −1 if a label is no class. The mask says which weights get a gradient; no mask: all of them.
// kept5 and kept6: what the dropouts before fc1 and fc2 multiply by, 0 or 2.
float gradient(Workspace *workspace, const float *u, const float *mask, const float *x, const int64_t *y, float *g,
               const float *kept5, const float *kept6, int samples) {
    Workspace &space = *workspace;
    double loss = 0;
    for (int s = 0; s < samples; s++) if (y[s] < 0 || y[s] >= CLASSES) return -1;
    std::memset(g, 0, sizeof(float) * Sizes::all);
    space.layers.read(u, mask);
    for (int s = 0; s < samples; s += TILES * LANES) {
        const int here = samples - s < TILES * LANES ? samples - s : TILES * LANES, tiles = (here + LANES - 1) / LANES;
        forward(space, u, x + s * CHANNELS * SIZE * SIZE, kept5 + s * FEATURES, kept6 + s * H, here);
        for (int t = 0; t < tiles; t++)
            loss += cross_entropy<CLASSES, TILES>(space.logits + t, space.d8 + t, y + s + t * LANES, here - t * LANES,
                                                  1.0f / samples);
        backward(space, u, g, 2, tiles);
    }
    return loss / samples;
}

void logits(Workspace *workspace, const float *u, const float *x, float *out, const float *kept5, const float *kept6,
            int samples) {
    Workspace &space = *workspace;
    space.layers.read(u, nullptr);
    for (int s = 0; s < samples; s += TILES * LANES) {
        const int here = samples - s < TILES * LANES ? samples - s : TILES * LANES;
        forward(space, u, x + s * CHANNELS * SIZE * SIZE, kept5 ? kept5 + s * FEATURES : nullptr,
                kept6 ? kept6 + s * H : nullptr, here);
        for (int l = 0; l < here; l++)
            for (int k = 0, t = l / LANES; k < CLASSES; k++)
                out[(s + l) * CLASSES + k] = space.logits[k * TILES + t][l % LANES];
    }
}
}
