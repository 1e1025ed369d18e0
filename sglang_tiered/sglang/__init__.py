"""Every touch point with SGLang, one file per hooked or extended class."""
