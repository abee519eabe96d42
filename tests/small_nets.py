"""Made-up layers for naive transcriptions of a mask rule."""

from hypothesis import strategies as st


@st.composite
def small_nets(draw):
    """Up to three layers with weights, gradients and a mask, ties among them."""
    number = st.integers(-4, 4).map(float)
    sizes = draw(st.lists(st.integers(1, 12), min_size=1, max_size=3))
    w, g = ([draw(st.lists(number, min_size=n, max_size=n)) for n in sizes] for _ in range(2))
    m = [draw(st.lists(st.booleans(), min_size=n, max_size=n)) for n in sizes]
    return w, g, m
