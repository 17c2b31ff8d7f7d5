"""Level 1: one command, near the reach of a model of a hundred million parameters."""

from __future__ import annotations

from termrl.tasks.generate.family import Draw, Family, File, Folder, Instance, Tree, bystander, lines_of, without


def make_dir(draw: Draw) -> Instance:
    a = draw.word()
    before = bystander(draw)
    return Instance(f"Make a directory named {a}.", before, {**before, a: Folder()}, [f"mkdir {a}"])


def make_two_dirs(draw: Draw) -> Instance:
    a, b = draw.words(2)
    before = bystander(draw)
    after = {**before, a: Folder(), b: Folder()}
    return Instance(f"Make two directories named {a} and {b}.", before, after, [f"mkdir {a} {b}"])


def make_nested_dir(draw: Draw) -> Instance:
    a, b = draw.words(2)
    before = bystander(draw)
    after = {**before, f"{a}/{b}": Folder()}
    return Instance(f"Use mkdir -p to make the directory {a}/{b}.", before, after, [f"mkdir -p {a}/{b}"])


def remove_file(draw: Draw) -> Instance:
    a = f"{draw.word()}.txt"
    others = bystander(draw)
    before = {**others, a: File(draw.word())}
    return Instance(f"Remove the file {a}.", before, others, [f"rm {a}"])


def remove_dir(draw: Draw) -> Instance:
    a, b = draw.words(2)
    others = bystander(draw)
    before = {**others, f"{a}/{b}.txt": File(draw.word())}
    return Instance(f"Remove the directory {a}.", before, others, [f"rm -r {a}"])


def make_executable(draw: Draw) -> Instance:
    a, b = (f"{word}.sh" for word in draw.words(2))
    script = f"#!/bin/bash\necho {draw.word()}"
    before = {a: File(script), b: File(script)}
    return Instance(
        f"Make the script {a} executable.", before, {**before, a: File(script, runs=True)}, [f"chmod +x {a}"]
    )


def rename_file(draw: Draw) -> Instance:
    a, b = (f"{word}.txt" for word in draw.words(2))
    others = bystander(draw)
    content = File(draw.word())
    return Instance(f"Rename {a} to {b}.", {**others, a: content}, {**others, b: content}, [f"mv {a} {b}"])


def copy_file(draw: Draw) -> Instance:
    a, b = (f"{word}.txt" for word in draw.words(2))
    content = File(draw.word())
    before = {**bystander(draw), a: content}
    return Instance(f"Copy {a} to {b}.", before, {**before, b: content}, [f"cp {a} {b}"])


def move_into_dir(draw: Draw) -> Instance:
    a, b, c = draw.words(3)
    others = {f"{b}/{c}.txt": File(draw.word())}
    content = File(draw.word())
    return Instance(
        f"Use mv to move {a}.txt into the directory {b}.",
        {**others, f"{a}.txt": content},
        {**others, f"{b}/{a}.txt": content},
        [f"mv {a}.txt {b}/"],
    )


def create_empty(draw: Draw) -> Instance:
    a = f"{draw.word()}.txt"
    before = bystander(draw)
    return Instance(f"Create an empty file named {a}.", before, {**before, a: File()}, [f"touch {a}"])


def touch_file(draw: Draw) -> Instance:
    a = f"{draw.word()}.txt"
    before = bystander(draw)
    return Instance(f"Use touch to create an empty file named {a}.", before, {**before, a: File()}, [f"touch {a}"])


def write_word(draw: Draw) -> Instance:
    a, word = f"{draw.word()}.txt", draw.word()
    before = bystander(draw)
    instruction = f"Write the word {word} to a new file named {a}."
    return Instance(instruction, before, {**before, a: File(word)}, [f"echo {word} > {a}"])


def append_line(draw: Draw) -> Instance:
    a, word, text = f"{draw.word()}.txt", draw.word(), lines_of(draw, 2)
    before = {a: File(text)}
    instruction = f"Add the line {word} to the end of the file {a}."
    return Instance(instruction, before, {a: File(f"{text}\n{word}")}, [f"echo {word} >> {a}"])


def follow_note(draw: Draw) -> Instance:
    a = draw.word()
    before = {**bystander(draw), "note.txt": File(f"Make a directory named {a}.")}
    return Instance("Do what note.txt says.", before, {**before, a: Folder()}, ["cat note.txt", f"mkdir {a}"])


def remove_two_files(draw: Draw) -> Instance:
    a, b = (f"{word}.txt" for word in draw.words(2))
    others = bystander(draw)
    before = {**others, a: File(draw.word()), b: File(draw.word())}
    return Instance(f"Remove the files {a} and {b}.", before, others, [f"rm {a} {b}"])


def copy_into_dir(draw: Draw) -> Instance:
    a, b, c = draw.words(3)
    content = File(draw.word())
    before = {f"{b}/{c}.txt": File(draw.word()), f"{a}.txt": content}
    instruction = f"Use cp to copy {a}.txt into the directory {b}."
    return Instance(instruction, before, {**before, f"{b}/{a}.txt": content}, [f"cp {a}.txt {b}/"])


def make_named_dir(draw: Draw) -> Instance:
    note, a = f"{draw.word()}.txt", draw.word()
    before = {**bystander(draw), note: File(a)}
    instruction = f"Run cat {note}, then make a directory with the name that it shows."
    return Instance(instruction, before, {**before, a: Folder()}, [f"cat {note}", f"mkdir {a}"])


def remove_named(draw: Draw) -> Instance:
    files: Tree = {f"{word}.md": File(draw.word()) for word in draw.words(3)}
    note, a = f"{draw.word()}.txt", sorted(files)[draw.below(3)]
    before = {**files, note: File(a)}
    instruction = f"Run cat {note}, then remove the file that it names."
    return Instance(instruction, before, without(before, a), [f"cat {note}", f"rm {a}"])


LEVEL_1 = (
    Family("make-dir", 1, make_dir),
    Family("make-two-dirs", 1, make_two_dirs),
    Family("make-nested-dir", 1, make_nested_dir),
    Family("remove-file", 1, remove_file),
    Family("remove-dir", 1, remove_dir),
    Family("make-executable", 1, make_executable),
    Family("rename-file", 1, rename_file),
    Family("copy-file", 1, copy_file),
    Family("move-into-dir", 1, move_into_dir),
    Family("create-empty", 1, create_empty),
    Family("touch-file", 1, touch_file),
    Family("remove-two-files", 1, remove_two_files),
    Family("copy-into-dir", 1, copy_into_dir),
    Family("write-word", 1, write_word),
    Family("append-line", 1, append_line),
    Family("follow-note", 1, follow_note, look_first=True),
    Family("make-named-dir", 1, make_named_dir, look_first=True),
    Family("remove-named", 1, remove_named, look_first=True),
)
