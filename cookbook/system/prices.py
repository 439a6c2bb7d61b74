"""Prices of GPUs for an hour, as one marketplace listed them on one day. Plain values, no torch."""

PRICES = {
    "B300": 6.00,
    "B200": 5.00,
    "H200": 4.45,
    "RTX-PRO-6000": 1.45,
    "H100": 2.71,
    "A100-80GB": 1.71,
    "RTX5090": 0.67,
    "V100-PCIe-32GB": 0.17,
    "RTX4090": 0.39,
    "RTX3090": 0.16,
    "RTX3060": 0.14,
    "RTX4080": 0.15,
    "T4": 0.15,
}
"""US dollars for an hour of one GPU, by its name in `hardware.GPUS`: the "starting at" of each GPU of that table which
https://akash.network/pricing/gpus/ listed on 20 September 2026, as API Evangelist transcribed it
(api-evangelist/akash, plans/plans.yml). One list, since prices of several sellers are no order of the GPUs; it has no
A6000, A40, L4, L40S, MI300X or H100 over PCIe."""
SOURCE = 'dollars by Akash\'s list of 2026-09-20 ("starting at"); yours: --price'
