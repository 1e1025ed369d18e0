"""Where key/value rows live: layouts, device buffers, the host pool, tables over them.

Nothing in this package imports SGLang, `sglang_tiered.transfer` or
`sglang_tiered.policy`.
"""
