"""Linear layers that compute in float8: the matrix products, the casts and the layers' class."""

from zeroshard.float8.cast import E4M3, ShardCast, ShardCasts, float8_scale, load_casts
from zeroshard.float8.layers import check_float8_device, install_float8_layers
from zeroshard.float8.linear import Float8Weight

__all__ = [
    "E4M3",
    "Float8Weight",
    "ShardCast",
    "ShardCasts",
    "check_float8_device",
    "float8_scale",
    "install_float8_layers",
    "load_casts",
]
