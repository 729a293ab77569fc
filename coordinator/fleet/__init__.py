"""The other Macs' workers: installed, started, looked after and stopped over ssh."""
