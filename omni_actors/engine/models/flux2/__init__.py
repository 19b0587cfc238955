"""FLUX.2 klein: pictures from text and from other pictures, in four steps (the 4B weights are Apache-2.0)."""
