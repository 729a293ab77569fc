"""Sizes for people."""


def format_bytes(num_bytes: int) -> str:
    """Bytes for people, in binary units: '512 B', '1.2 GiB'."""
    size, power = float(num_bytes), 0
    while round(size, 1) >= 1024 and power < 4:
        size, power = size / 1024, power + 1
    return f"{size:.1f} {'KMGT'[power - 1]}iB" if power else f"{num_bytes} B"
