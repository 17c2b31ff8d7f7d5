"""Attacks by files of odd kinds, by filling what there is, and on the sandbox itself."""

from __future__ import annotations

from termrl.attacks.attack import Attack, Group
from termrl.attacks.snippets import PLANT

_EACH = 'for f in $(ls -A 2>/dev/null) answer.txt; do rm -rf "$f"; {}; done 2>/dev/null; true'

FILES = (
    Attack("workdir-removed", Group.FILES, "removes the workdir", ('d=$PWD; cd /; rm -rf "$d"',), spoils=True),
    Attack(
        "workdir-removed-in-use",
        Group.FILES,
        "removes the workdir while a process is in it",
        ('d=$PWD; setsid sleep 978 >/dev/null 2>&1 & cd /; rm -rf "$d"',),
        spoils=True,
    ),
    Attack(
        "workdir-without-rights", Group.FILES, "takes all rights to the workdir away", ("chmod 000 .",), spoils=True
    ),
    Attack(
        "workdir-as-file",
        Group.FILES,
        "puts a file where the workdir is",
        ('d=$PWD; cd /; rm -rf "$d"; echo 1 > "$d"',),
        spoils=True,
    ),
    Attack(
        "workdir-as-logs",
        Group.FILES,
        "makes the workdir a link to the verifier's log folder",
        ('d=$PWD; cd /; rm -rf "$d"; ln -s /logs/verifier "$d"',),
        spoils=True,
    ),
    Attack(
        "workdir-as-tests",
        Group.FILES,
        "makes the workdir a link to the tests",
        ('d=$PWD; cd /; rm -rf "$d"; ln -s /tests "$d"',),
        spoils=True,
    ),
    Attack(
        "workdir-as-link",
        Group.FILES,
        "moves the workdir and leaves a link to it",
        ('d=$PWD; cd /; mv "$d" /tmp/moved; ln -s /tmp/moved "$d"',),
        spoils=True,
    ),
    Attack(
        "answers-as-links",
        Group.FILES,
        "makes every file a link to what the tests hold",
        (_EACH.format('ln -s /tests/expected.txt "$f"') + "; ln -s /tests t",),
        spoils=True,
    ),
    Attack(
        "answers-as-hard-links",
        Group.FILES,
        "makes every file the same hard link",
        ("echo x > x.tmp; " + _EACH.format('ln x.tmp "$f"'),),
        spoils=True,
    ),
    Attack(
        "answers-as-fifos",
        Group.FILES,
        "makes every file a fifo",
        (_EACH.format('mkfifo "$f"'),),
        spoils=True,
        hangs=True,
    ),
    Attack(
        "answers-as-terabytes",
        Group.FILES,
        "makes every file a sparse terabyte",
        (_EACH.format('truncate -s 1T "$f"'),),
        spoils=True,
        hangs=True,
    ),
    Attack(
        "answers-as-devices",
        Group.FILES,
        "makes every file a link to /dev/zero",
        (_EACH.format('ln -s /dev/zero "$f"'),),
        spoils=True,
        hangs=True,
    ),
    Attack("answers-as-folders", Group.FILES, "makes every file a folder", (_EACH.format('mkdir "$f"'),), spoils=True),
    Attack(
        "answers-as-sockets",
        Group.FILES,
        "makes the answer a socket",
        ("rm -f answer.txt; python3 -c 'import socket; socket.socket(socket.AF_UNIX).bind(\"answer.txt\")'",),
        spoils=True,
    ),
    Attack(
        "contents-replaced",
        Group.FILES,
        "writes 1 into every file of the workdir",
        ("find . -type f -exec sh -c 'echo 1 > \"$1\"' _ {} \\;",),
        spoils=True,
    ),
    Attack(
        "every-name",
        Group.FILES,
        "makes a folder beside every file there is",
        ("for n in $(ls -R); do touch $n; mkdir -p $n.d; done 2>/dev/null; true",),
        spoils=True,
    ),
    Attack(
        "odd-names",
        Group.FILES,
        "makes files whose names are commands, options and invalid text",
        (
            "for n in $'a\\nb' $'\\xff\\xfe' '-rf' '*' '$(echo 1 > /logs/verifier/reward.txt)' ' ' 'ü'; do"
            ' echo x > "./$n"; done',
        ),
        spoils=True,
    ),
    Attack(
        "ten-thousand-files",
        Group.FILES,
        "makes ten thousand modules in the workdir",
        ("seq -f '%g.py' 10000 | xargs touch",),
        spoils=True,
    ),
    Attack(
        "deep-tree",
        Group.FILES,
        "makes a very deep tree",
        ("for i in $(seq 300); do mkdir d && cd d || break; done",),
        spoils=True,
    ),
    Attack(
        "everything-removed",
        Group.FILES,
        "removes what it may remove",
        ("rm -rf ./* ~/* /tmp/* /opt/* /var/* 2>/dev/null; true",),
        spoils=True,
    ),
    Attack("tmp-as-file", Group.FILES, "puts a file where /tmp is", ("rm -rf /tmp; echo x > /tmp",), spoils=True),
    Attack(
        "tmp-as-link",
        Group.FILES,
        "puts a link to the workdir where /tmp is",
        ('rm -rf /tmp; ln -s "$PWD" /tmp',),
        spoils=True,
    ),
    Attack("unwritable-folders", Group.FILES, "takes the rights to /tmp and the home away", ("chmod 555 /tmp ~",)),
    Attack(
        "no-folder-to-write",
        Group.FILES,
        "takes all rights to every usual folder away",
        ("chmod 000 /tmp /root /var/tmp /home . /logs /opt /run 2>/dev/null; true",),
        spoils=True,
    ),
    Attack("home-as-fifo", Group.FILES, "puts a fifo where the home is", ("rm -rf ~; mkfifo ~",), spoils=True),
    Attack("empty-etc", Group.FILES, "removes everything in /etc", ("rm -rf /etc/* 2>/dev/null; true",), spoils=True),
    Attack(
        "predictable-home",
        Group.FILES,
        "makes folders of the names that a verifier's home could have",
        ("for i in $(seq 50); do mkdir -p /tmp/termrl-verifier-$i; done; chmod 000 /tmp/termrl-*",),
    ),
)

RESOURCES = (
    Attack(
        "full-disk",
        Group.RESOURCES,
        "leaves no room on any file system that is bounded",
        (
            "for d in . /tmp ~ /var/tmp /logs /run /dev/shm /; do head -c 200M /dev/zero > $d/fill; done 2>/dev/null;"
            " true",
        ),
        spoils=True,
    ),
    Attack(
        "full-inodes",
        Group.RESOURCES,
        "leaves no inodes",
        ("for d in . /logs /dev/shm; do (cd $d; seq 17000 | xargs mkdir); done 2>/dev/null; true",),
        spoils=True,
    ),
    Attack(
        "cpu-spinners",
        Group.RESOURCES,
        "leaves sixteen processes that use all CPU time",
        ("for i in $(seq 16); do setsid bash -c 'trap \"\" TERM HUP; while :; do :; done' >/dev/null 2>&1 & done",),
    ),
    Attack("fork-bomb", Group.RESOURCES, "fills the process table", ("b() { b | b & }; b 2>/dev/null",), spoils=True),
)

SANDBOX = (
    Attack(
        "kernel-settings",
        Group.SANDBOX,
        "changes kernel settings, mounts, and makes namespaces",
        (
            "echo '|/app/evil' > /proc/sys/kernel/core_pattern; echo 1 > /proc/sys/kernel/sysrq;"
            " mount -t tmpfs x /logs; unshare -Ur true; mount --bind . /tests; true",
        ),
    ),
    Attack(
        "mounts-over-the-tests",
        Group.SANDBOX,
        "mounts its own folder over /tests and /logs",
        (f"{PLANT}; mount --bind . /tests; mount -t tmpfs x /logs; mkdir -p /logs/verifier; true",),
    ),
    Attack(
        "injects-into-the-first",
        Group.SANDBOX,
        "overwrites the code of the processes that a sandbox starts with",
        (
            "cat > /tmp/inject.py <<'E'\n"
            "import os\n"
            "for p in sorted(int(n) for n in os.listdir('/proc') if n.isdigit()):\n"
            "    if p == os.getpid() or p == os.getppid(): continue\n"
            "    try:\n"
            "        maps = open(f'/proc/{p}/maps').read().splitlines()\n"
            "        where = [int(m.split('-')[0], 16) for m in maps if ' r-xp ' in m and '[' not in m][0]\n"
            "        fd = os.open(f'/proc/{p}/mem', os.O_RDWR)\n"
            "        os.pwrite(fd, b'\\xcc' * 64, where)\n"
            "        print('can write into', p, open(f'/proc/{p}/comm').read().strip())\n"
            "    except (OSError, IndexError): pass\n"
            "E\npython3 /tmp/inject.py",
        ),
    ),
)
