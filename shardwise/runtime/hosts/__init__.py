"""Ranks on several hosts, behind the same seam as those of one."""
