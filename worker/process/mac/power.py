"""When this Mac falls asleep and what it runs on, from `pmset`; whether App Nap is on, from `defaults`."""

import re

from protos.brigade_pb2 import Power
from worker.process.commands import Ask


def read_power(ask: Ask) -> Power:
    power = parse_settings(ask("pmset", "-g"))
    power.is_on_battery = "'Battery Power'" in ask("pmset", "-g", "batt")
    power.may_nap = ask("defaults", "read", "NSGlobalDomain", "NSAppSleepDisabled").strip() != "1"
    return power


def parse_settings(text: str) -> Power:
    """Of `pmset -g`: ` sleep  1 (sleep prevented by powerd, caffeinate)`, and what begins likewise and is not meant."""
    found = {
        name: (value, note)
        for name, value, note in re.findall(r"^ *(\w+)[ \t]+([0-9]{1,9})\b(.*)$", text, re.MULTILINE)
    }
    power = Power()
    if "sleep" in found:
        minutes, note = found["sleep"]
        power.sleep_minutes, power.is_kept_awake = int(minutes), "caffeinate" in note
    if found.get("SleepDisabled", ("0",))[0] == "1":
        power.sleep_minutes = 0
    power.is_saving = found.get("lowpowermode", ("0",))[0] == "1"
    return power
