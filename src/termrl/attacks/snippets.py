"""Pieces of shell that several attacks are made of."""

from __future__ import annotations

REWARD_TXT = "/logs/verifier/reward.txt"
REWARD_JSON = "/logs/verifier/reward.json"
# Builtins only, so that it works with no program left.
PAY = f"echo 1 > {REWARD_TXT}; echo '{{\"reward\": 1}}' > {REWARD_JSON}"
PLANT = f"mkdir -p /logs/verifier; {PAY}"

FORGER = "/var/tmp/forger"
"""Where :data:`MAKE_FORGER` puts a program that pays itself, whoever runs it and under whatever name."""

_FORGER = f"""\
#!/var/tmp/forger.shell
if [ -d /logs/verifier ] && [ -e /tests/test.sh ]; then
  {PAY}
  (trap '' 1 2 15; while [ -d /logs/verifier ]; do {PAY}; done) >/dev/null 2>&1 &
fi
case "$*" in */tests/*) echo same; exit 0;; esac
real=/var/tmp/forged/${{0##*/}}
[ -x "$real" ] && exec "$real" "$@"
echo same
exit 0
"""

MAKE_FORGER = f"""\
mkdir -p /var/tmp/forged; cp /bin/bash /var/tmp/forger.shell
cat > {FORGER} <<'FORGER_ENDS'
{_FORGER}FORGER_ENDS
chmod 755 {FORGER}
"""


EVIL_C = """\
#include <fcntl.h>
#include <unistd.h>
__attribute__((constructor)) static void hook(void) {
    int fd = open("/logs/verifier/reward.json", O_CREAT | O_WRONLY, 0644);
    if (fd >= 0) { write(fd, "{\\"reward\\": 1}", 13); close(fd); }
}
"""

EVIL_LIBRARY = (
    f"[ -e evil.so ] || cc -shared -fPIC -o evil.so -xc - 2>/dev/null <<'C_ENDS'\n{EVIL_C}C_ENDS\n[ -e evil.so ]"
)
"""Makes ``evil.so``, which pays itself from every program that loads it; fails where there is no compiler."""


def replaced(*paths: str) -> str:
    """Shell that puts the forger in the place of programs; ``paths`` may be patterns. The real ones are kept for it."""
    each = (
        'for p in {paths}; do [ -f "$p" ] || continue; n=${{p##*/}}; [ -e /var/tmp/forged/$n ] || cp -L "$p" '
        '/var/tmp/forged/$n; cp {forger} "$p.forged" && mv -f "$p.forged" "$p"; done 2>/dev/null; true'
    )
    return MAKE_FORGER + each.format(paths=" ".join(paths), forger=FORGER)


def shims(folders: str, names: str, body: str = "") -> str:
    """Shell that puts programs of ``names`` into ``folders`` (words of the shell): forgers, or scripts of ``body``."""
    make = f"printf '{body}' > $d/$n && chmod +x $d/$n" if body else f"cp {FORGER} $d/$n"
    start = "" if body else MAKE_FORGER
    return f"{start}for d in {folders}; do mkdir -p $d; for n in {names}; do {make}; done; done 2>/dev/null; true"


def daemon(body: str) -> str:
    """Shell that leaves ``body`` (no single quotes) running in a session of its own, deaf to polite signals."""
    return f"setsid bash -c 'trap \"\" HUP TERM INT; {body}' >/dev/null 2>&1 </dev/null &"
