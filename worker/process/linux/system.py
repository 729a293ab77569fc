"""Whether this machine may be put to sleep, what it runs on, and its firewall: from systemd and psutil."""

import psutil

from protos.brigade_pb2 import Power
from worker.process.commands import Ask


def read_power(ask: Ask) -> Power:
    power = parse_targets(ask("systemctl", "is-enabled", "sleep.target", "suspend.target"))
    battery = psutil.sensors_battery() if hasattr(psutil, "sensors_battery") else None
    power.is_on_battery = battery is not None and battery.power_plugged is False
    return power


def parse_targets(text: str) -> Power:
    """Of `systemctl is-enabled`: a machine without these targets, or with masked ones, is not put to sleep."""
    states = text.split()
    may_sleep = any(state not in ("masked", "masked-runtime", "not-found") for state in states)
    return Power() if may_sleep else Power(sleep_minutes=0)


def read_firewall(ask: Ask) -> str:
    return parse_services(ask("systemctl", "is-active", "firewalld", "ufw"))


def parse_services(text: str) -> str:
    """Of `systemctl is-active`, a line each; nothing where there is no systemd."""
    states = text.split()
    return ("on" if "active" in states else "off") if states else ""
