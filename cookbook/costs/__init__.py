"""One ledger of what training costs: every number of bytes, messages and FLOPs is from here, or held against it."""
