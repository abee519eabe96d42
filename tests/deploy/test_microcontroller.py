"""The C file of a committed run on an emulated Cortex-M4: ten garments get PyTorch's logits, in little memory."""

import shutil
import subprocess

import pytest
import torch
from forms import recorded

from feddip_core.deploy.c import c_file

TOOLS = ("arm-none-eabi-gcc", "arm-none-eabi-size", "qemu-system-arm")
CPU = ["-mcpu=cortex-m4", "-mthumb", "-mfloat-abi=hard", "-mfpu=fpv4-sp-d16", "-O2", "-std=c99", "-Wall", "-Werror"]
# Semihosting: the emulator takes the text and the end of the program from the processor's breakpoints.
START = """
#include <stdint.h>
void network_classify(const float *sample, float *logits);
extern uint32_t bss_start, bss_end, stack_top;
static int call(int what, const void *of)
{
    register int r0 __asm__("r0") = what;
    register const void *r1 __asm__("r1") = of;
    __asm__ volatile("bkpt 0xab" : "+r"(r0) : "r"(r1) : "memory");
    return r0;
}
static void hexadecimal(float v)
{
    union { float f; uint32_t u; } bits = { .f = v };
    char text[10];
    for (int i = 0; i < 8; i++) text[i] = "0123456789abcdef"[(bits.u >> (28 - 4 * i)) & 15];
    text[8] = '\\n'; text[9] = 0;
    call(4, text);
}
static const uint8_t samples[COUNT][INPUTS] = { SAMPLES };
static float sample[INPUTS], logits[OUTPUTS];
void reset(void)
{
    *(volatile uint32_t *)0xE000ED88 |= 0xF << 20;  /* the floating-point unit is off at first */
    __asm__ volatile("dsb\\nisb");
    for (uint32_t *p = &bss_start; p < &bss_end; p++) *p = 0;
    for (int n = 0; n < COUNT; n++) {
        for (int i = 0; i < INPUTS; i++) sample[i] = samples[n][i];
        network_classify(sample, logits);
        for (int i = 0; i < OUTPUTS; i++) hexadecimal(logits[i]);
    }
    call(0x18, (void *)0x20026);
    for (;;) ;
}
__attribute__((section(".vectors"), used)) static void *const vectors[] = { &stack_top, (void *)reset };
"""
LAYOUT = """
MEMORY { flash (rx) : ORIGIN = 0, LENGTH = 1M  ram (rw) : ORIGIN = 0x20000000, LENGTH = 128K }
stack_top = ORIGIN(ram) + LENGTH(ram);
SECTIONS {
  .text : { *(.vectors) *(.text*) *(.rodata*) } > flash
  .bss (NOLOAD) : { bss_start = .; *(.bss*) *(COMMON) . = ALIGN(4); bss_end = .; } > ram
}
"""


@pytest.mark.slow
@pytest.mark.parametrize(("sparsity", "most_flash"), [(0.9, 50_000), (0.99, 8_000)])
def test_a_microcontroller_gives_pytorchs_logits(tmp_path, capsys, mini, sparsity, most_flash):
    if missing := [tool for tool in TOOLS if not shutil.which(tool)]:
        pytest.skip(f"{', '.join(missing)} not found; Debian: apt-get install gcc-arm-none-eabi qemu-system-arm")
    graph, x, y = recorded(sparsity), mini.x_test[:10], mini.y_test[:10]
    rows = ", ".join("{" + ", ".join(map(str, v.flatten().tolist())) + "}" for v in x)
    numbers = f"#define COUNT 10\n#define INPUTS 784\n#define OUTPUTS 10\n#define SAMPLES {rows}\n"
    (tmp_path / "network.c").write_text(c_file(graph), "utf-8")
    (tmp_path / "start.c").write_text(numbers + START, "utf-8")
    (tmp_path / "layout.ld").write_text(LAYOUT, "utf-8")

    def call(*words):
        done = subprocess.run(words, cwd=tmp_path, check=True, capture_output=True, encoding="utf-8", timeout=300)
        return done.stdout + done.stderr

    call(TOOLS[0], *CPU, "-c", "network.c")
    flash, data, ram = map(int, call(TOOLS[1], "network.o").splitlines()[1].split()[:3])
    call(TOOLS[0], *CPU, "-nostartfiles", "-T", "layout.ld", "start.c", "network.o", "-lgcc", "-o", "program.elf")
    said = call(
        TOOLS[2], "-M", "mps2-an386", "-nographic", "-monitor", "none", "-serial", "none",
        "-semihosting-config", "enable=on,target=native", "-kernel", "program.elf",
    )  # fmt: skip
    bits = torch.tensor([int(word, 16) for word in said.split()], dtype=torch.int64).to(torch.int32)
    logits, expected = bits.view(torch.float32).view(10, 10), graph(x)
    right = int((logits.argmax(1) == y).sum())
    with capsys.disabled():
        words = f"{flash:,} bytes of flash, {ram:,} of memory, {right} of 10 garments right"
        print(f"\nLeNet-5 at {sparsity:.0%} on a Cortex-M4: {words}")
    assert (logits - expected).abs().max() < 1e-4 and torch.equal(logits.argmax(1), expected.argmax(1))
    assert flash < most_flash and data == 0 and ram < 40_000 and right >= 7
