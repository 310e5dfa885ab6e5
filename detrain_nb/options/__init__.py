"""The lines that people type, in a notebook and in a shell: what both take, and what is wrong with one."""
