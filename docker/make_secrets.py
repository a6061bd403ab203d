"""Makes the secret files of compose.yaml in docker/secrets, each once: what is there already stays as it is."""

from __future__ import annotations

import base64
import secrets
from pathlib import Path

FOLDER = Path(__file__).parent / "secrets"


def main() -> None:
    """Write what is missing."""
    FOLDER.mkdir(mode=0o700, exist_ok=True)
    password = secrets.token_hex(24)
    values = {
        "api_key": f"akv-{secrets.token_hex(24)}",
        "admin_key": secrets.token_hex(24),
        "worker_key": secrets.token_hex(24),
        "secret": secrets.token_hex(32),
        "join_token": secrets.token_hex(32),
        "ledger_key": base64.b64encode(secrets.token_bytes(32)).decode(),
        "grafana_password": secrets.token_hex(12),
        "valkey_password": password,
        "store_url": f"redis://:{password}@valkey:6379/0",
    }
    if (FOLDER / "valkey_password").exists() != (FOLDER / "store_url").exists():
        raise SystemExit(f"{FOLDER}: valkey_password and store_url belong together: remove the one that is left")
    for name, value in values.items():
        file = FOLDER / name
        if not file.exists():
            file.write_text(value + "\n")
            # The folder is closed to others; the containers' user must be able to read the file itself.
            file.chmod(0o644)
            print(f"made {file}")


if __name__ == "__main__":
    main()
