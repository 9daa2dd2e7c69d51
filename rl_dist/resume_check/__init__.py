"""Whether a killed and resumed run equals an uninterrupted one."""
