"""Level 3: repairs that need looking before acting, several files, permissions."""

from __future__ import annotations

from termrl.tasks.generate.family import Archive, Draw, Family, File, Folder, Instance, Tree, bystander, without


def _script(command: str) -> str:
    return f"#!/bin/bash\n{command}"


def run_scripts(draw: Draw) -> Instance:
    names = draw.shuffled(draw.words(4))
    texts: Tree = {name: File(draw.word()) for name in names[:2]}
    scripts = {name: _script(f"echo {draw.word()}") for name in names[2:]}
    before: Tree = {**texts, **{name: File(text) for name, text in scripts.items()}}
    after: Tree = {**texts, **{name: File(text, runs=True) for name, text in scripts.items()}}
    instruction = "Make the files that begin with #! executable, and no others."
    return Instance(instruction, before, after, ["chmod +x $(grep -l '^#!' *)"])


def close_files(draw: Draw) -> Instance:
    names = draw.shuffled([f"{word}.txt" for word in draw.words(4)])
    texts = {name: draw.word() for name in names}
    before = {name: File(text, mode=0o666 if name in names[:2] else 0o644) for name, text in texts.items()}
    after = {name: File(text, mode=0o640 if name in names[:2] else 0o644) for name, text in texts.items()}
    instruction = "Give the files that everybody can write mode 640, and leave the others."
    return Instance(instruction, before, after, ["find . -type f -perm -002 -exec chmod 640 {} +"])


def private_dir(draw: Draw) -> Instance:
    a, b = draw.words(2)
    others = {f"{b}/{draw.word()}.txt": File(draw.word(), mode=0o644)}
    texts = {f"{a}/{word}.txt": draw.word() for word in draw.words(2)}
    before = {**others, **{path: File(text, mode=0o644) for path, text in texts.items()}}
    closed = {path: File(text, mode=0o600) for path, text in texts.items()}
    after: Tree = {**others, a: Folder(mode=0o700), **closed}
    instruction = f"Give the directory {a} mode 700 and the files in it mode 600."
    return Instance(instruction, before, after, [f"chmod 700 {a}", f"chmod 600 {a}/*"])


def misplaced_file(draw: Draw) -> Instance:
    a = f"{draw.word()}.sh"
    wanted, found, elsewhere = draw.words(3)
    name, entry = f"{draw.word()}.txt", File(draw.word())
    stay = {
        a: File(_script(f"cat {wanted}/{name}"), runs=True),
        **{f"{folder}/{draw.word()}.txt": File(draw.word()) for folder in (wanted, found, elsewhere)},
    }
    instruction = f"The script {a} fails; move the file that it needs to where it looks for it."
    before, after = {**stay, f"{found}/{name}": entry}, {**stay, f"{wanted}/{name}": entry}
    return Instance(instruction, before, after, [f"cat {a}", f"mv {found}/{name} {wanted}/"])


def misnamed_file(draw: Draw) -> Instance:
    a, folder, name = f"{draw.word()}.sh", draw.word(), draw.word()
    entry = File(draw.word())
    stay = {
        a: File(_script(f"cat {folder}/{name}.txt"), runs=True),
        f"{folder}/{draw.word()}.md": File(draw.word()),
    }
    instruction = f"The script {a} fails; rename the file that it needs to what it looks for."
    before, after = {**stay, f"{folder}/{name}.md": entry}, {**stay, f"{folder}/{name}.txt": entry}
    return Instance(instruction, before, after, [f"cat {a}", f"mv {folder}/{name}.md {folder}/{name}.txt"])


def line_ends(draw: Draw) -> Instance:
    names = draw.shuffled([f"{word}.sh" for word in draw.words(3)])
    texts = {name: _script(f"echo {draw.word()}") for name in names}
    broken = names[0]
    before = {
        name: File(text.replace("\n", "\r\n") + "\r" if name == broken else text, runs=True)
        for name, text in texts.items()
    }
    after = {name: File(text, runs=True) for name, text in texts.items()}
    instruction = "One of the scripts has Windows line ends; give it those of Linux."
    return Instance(instruction, before, after, [f"sed -i 's/\\r$//' {broken}"])


def same_port(draw: Draw) -> Instance:
    a, b = (f"{word}.conf" for word in draw.words(2))
    old, new = 1000 + draw.below(4000), 5000 + draw.below(4000)
    names = draw.words(2)
    right = File(f"name = {names[0]}\nport = {new}")
    before = {a: File(f"name = {names[1]}\nport = {old}"), b: right}
    after = {a: File(f"name = {names[1]}\nport = {new}"), b: right}
    solution = [f"cat {b}", f"sed -i 's/port = {old}/port = {new}/' {a}"]
    return Instance(f"Give {a} the port that stands in {b}.", before, after, solution)


def put_back(draw: Draw) -> Instance:
    names = [f"{word}.txt" for word in draw.words(2)]
    others = bystander(draw)
    right = {name: File(draw.word()) for name in names}
    damaged = {name: File(draw.word()) for name in names}
    before = {**others, **damaged, **{f"{name}.bak": entry for name, entry in right.items()}}
    instruction = "Move each .bak file back over its original."
    solution = ['for copy in *.bak; do mv "$copy" "${copy%.bak}"; done']
    return Instance(instruction, before, {**others, **right}, solution)


def restore_file(draw: Draw) -> Instance:
    a, folder, archive = f"{draw.word()}.txt", draw.word(), draw.word()
    right, damaged = draw.words(2)
    stored = Archive({a: right, f"{draw.word()}.txt": draw.word()})
    stay: Tree = {**bystander(draw), f"{folder}/{archive}.tar.gz": stored}
    instruction = f"The file {a} is damaged; restore it from the archive in {folder}."
    before, after = {**stay, a: File(damaged)}, {**stay, a: File(right)}
    return Instance(instruction, before, after, [f"ls {folder}", f"tar -xzf {folder}/{archive}.tar.gz {a}"])


def rename_everywhere(draw: Draw) -> Instance:
    folder, below, old, new = draw.words(4)
    paths = [f"{folder}/{draw.word()}.txt", f"{folder}/{below}/{draw.word()}.txt", f"{folder}/{draw.word()}.txt"]
    lines = {path: draw.words(2) for path in paths}
    for path in paths[:2]:
        lines[path].insert(draw.below(3), old)
    before = {path: File("\n".join(text)) for path, text in lines.items()}
    after = {path: File("\n".join(new if word == old else word for word in text)) for path, text in lines.items()}
    instruction = f"Replace the line {old} by {new} in every file below the directory {folder}."
    return Instance(instruction, before, after, [f"find {folder} -type f -exec sed -i 's/^{old}$/{new}/' {{}} +"])


def remove_repeat(draw: Draw) -> Instance:
    texts: Tree = {f"{word}.txt": File(draw.word()) for word in draw.words(3)}
    repeated = list(texts.values())[draw.below(3)]
    notes = draw.shuffled(draw.words(3))
    before: Tree = {**texts, f"{notes[0]}.md": repeated, **{f"{word}.md": File(draw.word()) for word in notes[1:]}}
    solution = ['for note in *.md; do if grep -qxf "$note" *.txt; then rm "$note"; fi; done']
    instruction = "Remove the .md file that repeats the text of a .txt file."
    return Instance(instruction, before, without(before, f"{notes[0]}.md"), solution)


def follow_steps(draw: Draw) -> Instance:
    a, b, c, d = draw.words(4)
    entry = File(draw.word())
    steps = draw.shuffled(
        [
            (f"Make a directory named {a}.", f"mkdir {a}"),
            (f"Remove the file {b}.txt.", f"rm {b}.txt"),
            (f"Rename {c}.txt to {d}.txt.", f"mv {c}.txt {d}.txt"),
        ]
    )
    note: Tree = {**bystander(draw), "note.txt": File("\n".join(text for text, _ in steps))}
    before: Tree = {**note, f"{b}.txt": File(draw.word()), f"{c}.txt": entry}
    after: Tree = {**note, a: Folder(), f"{d}.txt": entry}
    instruction = "Do what each line of note.txt says."
    return Instance(instruction, before, after, ["cat note.txt", *(command for _, command in steps)])


def follow_chain(draw: Draw) -> Instance:
    a, b, c, d = (f"{word}.txt" for word in draw.words(4))
    before = {a: File(b), b: File(c), c: File(draw.word()), d: File(draw.word())}
    instruction = f"Each file names the next one; begin with {a} and remove the last."
    return Instance(instruction, before, without(before, c), [f"cat {a}", f"cat {b}", f"rm {c}"])


def split_lines(draw: Draw) -> Instance:
    a = f"{draw.word()}.txt"
    texts = {word: draw.word() for word in draw.words(3)}
    before = {a: File("\n".join(f"{name} {text}" for name, text in texts.items()))}
    after = {**before, **{f"{name}.md": File(text) for name, text in texts.items()}}
    instruction = f"For each line of {a} make a file: its first word with .md is the name, its second the text."
    return Instance(instruction, before, after, [f"awk '{{print $2 > ($1 \".md\")}}' {a}"])


def make_listed(draw: Draw) -> Instance:
    folder = draw.word()
    names = [f"{word}.md" for word in draw.words(4)]
    missing = names[draw.below(4)]
    before = {
        "list.txt": File("\n".join(names)),
        **{f"{folder}/{name}": File(draw.word()) for name in names if name != missing},
    }
    instruction = f"Make the one file that list.txt names but the directory {folder} lacks, empty."
    return Instance(
        instruction,
        before,
        {**before, f"{folder}/{missing}": File()},
        ["cat list.txt", f"ls {folder}", f"touch {folder}/{missing}"],
    )


def remove_unlisted(draw: Draw) -> Instance:
    folder = draw.word()
    names = [f"{word}.md" for word in draw.words(4)]
    extra = names[draw.below(4)]
    before = {
        "list.txt": File("\n".join(name for name in names if name != extra)),
        **{f"{folder}/{name}": File(draw.word()) for name in names},
    }
    instruction = f"Remove the one file in the directory {folder} that list.txt does not name."
    solution = ["cat list.txt", f"ls {folder}", f"rm {folder}/{extra}"]
    return Instance(instruction, before, without(before, f"{folder}/{extra}"), solution)


def move_matching(draw: Draw) -> Instance:
    folder, key = draw.words(2)
    names = draw.shuffled([f"{word}.txt" for word in draw.words(4)])
    stay = {f"{folder}/{draw.word()}.txt": File(draw.word()), **{name: File(draw.word()) for name in names[2:]}}
    moved = {name: File(f"{draw.word()}\n{key}") for name in names[:2]}
    after = {**stay, **{f"{folder}/{name}": entry for name, entry in moved.items()}}
    instruction = f"Move the files that hold the line {key} into the directory {folder}."
    return Instance(instruction, {**stay, **moved}, after, [f"mv $(grep -lx {key} *.txt) {folder}/"])


LEVEL_3 = (
    Family("run-scripts", 3, run_scripts, look_first=True),
    Family("close-files", 3, close_files, look_first=True),
    Family("private-dir", 3, private_dir),
    Family("misplaced-file", 3, misplaced_file, look_first=True),
    Family("misnamed-file", 3, misnamed_file, look_first=True),
    Family("line-ends", 3, line_ends, look_first=True),
    Family("same-port", 3, same_port, look_first=True),
    Family("put-back", 3, put_back),
    Family("restore-file", 3, restore_file, look_first=True),
    Family("rename-everywhere", 3, rename_everywhere),
    Family("remove-repeat", 3, remove_repeat, look_first=True),
    Family("follow-steps", 3, follow_steps, look_first=True),
    Family("follow-chain", 3, follow_chain, look_first=True),
    Family("split-lines", 3, split_lines),
    Family("make-listed", 3, make_listed, look_first=True),
    Family("remove-unlisted", 3, remove_unlisted, look_first=True),
    Family("move-matching", 3, move_matching, look_first=True),
)
