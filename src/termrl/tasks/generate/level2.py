"""Level 2: text processing, counting, archives and finding; one or two commands of some length."""

from __future__ import annotations

from termrl.tasks.generate.family import Archive, Draw, Family, File, Gzip, Instance, Tree, bystander, lines_of, without


def remove_empty(draw: Draw) -> Instance:
    files: Tree = {f"{word}.txt": File(draw.word()) for word in draw.words(2)}
    a = f"{draw.word()}.txt"
    return Instance("Remove the file that is empty.", {**files, a: File()}, files, ["find . -type f -empty -delete"])


def count_lines(draw: Draw) -> Instance:
    a, b = (f"{word}.txt" for word in draw.words(2))
    n = 3 + draw.below(5)
    before = {a: File(lines_of(draw, n))}
    instruction = f"Write the number of lines in {a} to a new file named {b}."
    return Instance(instruction, before, {**before, b: File(str(n))}, [f"wc -l < {a} > {b}"])


def sort_file(draw: Draw) -> Instance:
    a, b = (f"{word}.txt" for word in draw.words(2))
    lines = draw.words(4)
    if lines == sorted(lines):
        lines.reverse()
    before = {a: File("\n".join(lines))}
    after = {**before, b: File("\n".join(sorted(lines)))}
    return Instance(f"Sort the lines of {a} into a new file named {b}.", before, after, [f"sort {a} > {b}"])


def first_lines(draw: Draw) -> Instance:
    a, b = (f"{word}.txt" for word in draw.words(2))
    n = 2 + draw.below(2)
    lines = draw.words(n + 2)
    before = {a: File("\n".join(lines))}
    after = {**before, b: File("\n".join(lines[:n]))}
    instruction = f"Write the first {n} lines of {a} to a new file named {b}."
    return Instance(instruction, before, after, [f"head -n {n} {a} > {b}"])


def matching_lines(draw: Draw) -> Instance:
    a, b = (f"{word}.txt" for word in draw.words(2))
    key, one, two, three = draw.words(4)
    lines = [f"{one} {key}", two, f"{three} {key}"]
    before = {a: File("\n".join(lines))}
    after = {**before, b: File(f"{lines[0]}\n{lines[2]}")}
    instruction = f"Write the lines of {a} that hold {key} to a new file named {b}."
    return Instance(instruction, before, after, [f"grep -w {key} {a} > {b}"])


def find_and_copy(draw: Draw) -> Instance:
    texts = draw.words(3)
    files: Tree = {f"{draw.word()}.txt": File(text) for text in texts}
    b, key = f"{draw.word()}.txt", texts[draw.below(3)]
    instruction = f"Copy the file that holds the word {key} to {b}."
    return Instance(instruction, files, {**files, b: File(key)}, [f'cp "$(grep -lwr {key} .)" {b}'])


def last_lines(draw: Draw) -> Instance:
    a, b = (f"{word}.txt" for word in draw.words(2))
    n = 2 + draw.below(2)
    lines = draw.words(n + 2)
    before = {a: File("\n".join(lines))}
    after = {**before, b: File("\n".join(lines[-n:]))}
    instruction = f"Write the last {n} lines of {a} to a new file named {b}."
    return Instance(instruction, before, after, [f"tail -n {n} {a} > {b}"])


def reverse_lines(draw: Draw) -> Instance:
    a, b = (f"{word}.txt" for word in draw.words(2))
    lines = draw.words(4)
    before = {a: File("\n".join(lines))}
    after = {**before, b: File("\n".join(reversed(lines)))}
    instruction = f"Write the lines of {a} in reverse order to a new file named {b}."
    return Instance(instruction, before, after, [f"tac {a} > {b}"])


def unique_lines(draw: Draw) -> Instance:
    a, b = (f"{word}.txt" for word in draw.words(2))
    once = draw.words(3)
    lines = draw.shuffled([*once, once[0], once[1]])
    before = {a: File("\n".join(lines))}
    after = {**before, b: File("\n".join(sorted(once)))}
    instruction = f"Write the sorted lines of {a}, each only once, to a new file named {b}."
    return Instance(instruction, before, after, [f"sort -u {a} > {b}"])


def count_matches(draw: Draw) -> Instance:
    a, b = (f"{word}.txt" for word in draw.words(2))
    key, *others = draw.words(6)
    n = 2 + draw.below(3)
    lines = [f"{word} {key}" if index < n else word for index, word in enumerate(others)]
    before = {a: File("\n".join(draw.shuffled(lines)))}
    instruction = f"Write the number of lines of {a} that hold {key} to a new file named {b}."
    return Instance(instruction, before, {**before, b: File(str(n))}, [f"grep -cw {key} {a} > {b}"])


def replace_line(draw: Draw) -> Instance:
    a = f"{draw.word()}.txt"
    old, new, *others = draw.words(5)
    lines = draw.shuffled([old, *others])
    after = {a: File("\n".join(new if line == old else line for line in lines))}
    instruction = f"Replace the line {old} by {new} in the file {a}."
    return Instance(instruction, {a: File("\n".join(lines))}, after, [f"sed -i 's/^{old}$/{new}/' {a}"])


def delete_line(draw: Draw) -> Instance:
    a = f"{draw.word()}.txt"
    gone, *others, last = draw.words(4)
    lines = [*draw.shuffled([gone, *others]), last]  # emptying the last line would look like deleting it
    after = {a: File("\n".join(line for line in lines if line != gone))}
    return Instance(
        f"Delete the line {gone} from the file {a}.", {a: File("\n".join(lines))}, after, [f"sed -i '/^{gone}$/d' {a}"]
    )


def second_words(draw: Draw) -> Instance:
    a, b = (f"{word}.txt" for word in draw.words(2))
    first, second = draw.words(3), draw.words(3)
    before = {a: File("\n".join(f"{one} {two}" for one, two in zip(first, second, strict=True)))}
    after = {**before, b: File("\n".join(second))}
    instruction = f"Write the second word of each line of {a} to a new file named {b}."
    return Instance(instruction, before, after, [f"awk '{{print $2}}' {a} > {b}"])


def sum_numbers(draw: Draw) -> Instance:
    a, b = (f"{word}.txt" for word in draw.words(2))
    numbers = [1 + draw.below(90) for _ in range(4)]
    lines = [f"{word} {number}" for word, number in zip(draw.words(4), numbers, strict=True)]
    before = {a: File("\n".join(lines))}
    after = {**before, b: File(str(sum(numbers)))}
    instruction = f"Write the sum of the numbers in {a} to a new file named {b}."
    return Instance(instruction, before, after, [f"awk '{{sum += $2}} END {{print sum}}' {a} > {b}"])


def join_files(draw: Draw) -> Instance:
    a, b, c = (f"{word}.txt" for word in draw.words(3))
    one, two = lines_of(draw, 2), lines_of(draw, 2)
    before = {a: File(one), b: File(two)}
    instruction = f"Join {a} and {b}, in this order, into a new file named {c}."
    return Instance(instruction, before, {**before, c: File(f"{one}\n{two}")}, [f"cat {a} {b} > {c}"])


def count_files(draw: Draw) -> Instance:
    a, b = draw.word(), f"{draw.word()}.txt"
    n = 3 + draw.below(5)
    before = {f"{a}/{word}.md": File(word) for word in draw.words(n)}
    instruction = f"Write the number of files in the directory {a} to a new file named {b}."
    return Instance(instruction, before, {**before, b: File(str(n))}, [f"ls {a} | wc -l > {b}"])


def move_by_suffix(draw: Draw) -> Instance:
    a = draw.word()
    stay = {**bystander(draw), f"{a}/{draw.word()}.txt": File(draw.word())}
    moved = {f"{word}.md": File(draw.word()) for word in draw.words(2 + draw.below(2))}
    after = {**stay, **{f"{a}/{name}": entry for name, entry in moved.items()}}
    return Instance(f"Move every .md file into the directory {a}.", {**stay, **moved}, after, [f"mv *.md {a}/"])


def private_file(draw: Draw) -> Instance:
    a, b = (f"{word}.txt" for word in draw.words(2))
    text = draw.word()
    before = {a: File(text, mode=0o644), b: File(text, mode=0o644)}
    after = {**before, a: File(text, mode=0o600)}
    return Instance(f"Let only its owner read and write the file {a}.", before, after, [f"chmod 600 {a}"])


def pack_dir(draw: Draw) -> Instance:
    a, b = draw.words(2)
    texts = {f"{a}/{word}.txt": draw.word() for word in draw.words(2)}
    before: Tree = {**bystander(draw), **{path: File(text) for path, text in texts.items()}}
    after = {**before, f"{b}.tar.gz": Archive(texts)}
    instruction = f"Pack the directory {a} into a new archive named {b}.tar.gz."
    return Instance(instruction, before, after, [f"tar -czf {b}.tar.gz {a}"])


def unpack_archive(draw: Draw) -> Instance:
    a, b = f"{draw.word()}.tar.gz", draw.word()
    texts = {f"{b}/{word}.txt": draw.word() for word in draw.words(2)}
    before: Tree = {**bystander(draw), a: Archive(texts)}
    after = {**before, **{path: File(text) for path, text in texts.items()}}
    return Instance(f"Unpack the archive {a}.", before, after, [f"tar -xzf {a}"])


def unpack_one(draw: Draw) -> Instance:
    a, b = f"{draw.word()}.tar.gz", f"{draw.word()}.txt"
    texts = draw.shuffled([(b, draw.word()), *((f"{word}.txt", draw.word()) for word in draw.words(2))])
    before: Tree = {**bystander(draw), a: Archive(dict(texts))}
    after = {**before, b: File(dict(texts)[b])}
    return Instance(f"Unpack only the file {b} from the archive {a}.", before, after, [f"tar -xzf {a} {b}"])


def compress_file(draw: Draw) -> Instance:
    a, text = f"{draw.word()}.txt", lines_of(draw, 3)
    others = bystander(draw)
    after: Tree = {**others, f"{a}.gz": Gzip(text)}
    return Instance(f"Compress {a} in place with gzip.", {**others, a: File(text)}, after, [f"gzip {a}"])


def decompress_file(draw: Draw) -> Instance:
    a, text = f"{draw.word()}.txt", lines_of(draw, 3)
    others = bystander(draw)
    before: Tree = {**others, f"{a}.gz": Gzip(text)}
    return Instance(f"Decompress {a}.gz in place.", before, {**others, a: File(text)}, [f"gzip -d {a}.gz"])


def find_and_remove(draw: Draw) -> Instance:
    texts = draw.words(3)
    names = [f"{word}.txt" for word in draw.words(3)]
    before: Tree = {name: File(text) for name, text in zip(names, texts, strict=True)}
    chosen = draw.below(3)
    instruction = f"Remove the file that holds the word {texts[chosen]}."
    return Instance(instruction, before, without(before, names[chosen]), [f"rm $(grep -lx {texts[chosen]} *)"])


def find_and_move(draw: Draw) -> Instance:
    a = f"{draw.word()}.txt"
    folders = draw.words(3)
    others = {f"{folder}/{draw.word()}.txt": File(draw.word()) for folder in folders}
    entry = File(draw.word())
    before = {**others, f"{folders[draw.below(3)]}/{a}": entry}
    instruction = f"Find the file {a} and move it to the current directory."
    return Instance(instruction, before, {**others, a: entry}, [f"mv */{a} ."])


def remove_largest(draw: Draw) -> Instance:
    files: Tree = {f"{word}.txt": File(draw.word()) for word in draw.words(3)}
    a = f"{draw.word()}.txt"
    before = {**files, a: File(lines_of(draw, 8))}
    return Instance("Remove the largest file.", before, files, ['rm "$(ls -S | head -n 1)"'])


LEVEL_2 = (
    Family("remove-empty", 2, remove_empty, look_first=True),
    Family("count-lines", 2, count_lines),
    Family("sort-file", 2, sort_file),
    Family("first-lines", 2, first_lines),
    Family("matching-lines", 2, matching_lines),
    Family("find-and-copy", 2, find_and_copy, look_first=True),
    Family("last-lines", 2, last_lines),
    Family("reverse-lines", 2, reverse_lines),
    Family("unique-lines", 2, unique_lines),
    Family("count-matches", 2, count_matches),
    Family("replace-line", 2, replace_line),
    Family("delete-line", 2, delete_line),
    Family("second-words", 2, second_words),
    Family("sum-numbers", 2, sum_numbers),
    Family("join-files", 2, join_files),
    Family("count-files", 2, count_files),
    Family("move-by-suffix", 2, move_by_suffix),
    Family("private-file", 2, private_file),
    Family("pack-dir", 2, pack_dir),
    Family("unpack-archive", 2, unpack_archive),
    Family("unpack-one", 2, unpack_one),
    Family("compress-file", 2, compress_file),
    Family("decompress-file", 2, decompress_file),
    Family("find-and-remove", 2, find_and_remove, look_first=True),
    Family("find-and-move", 2, find_and_move, look_first=True),
    Family("remove-largest", 2, remove_largest, look_first=True),
)
