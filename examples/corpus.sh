#!/usr/bin/env bash
# Makes a corpus of real text: perl.bin, perl.idx and tokenizer.json in a folder.
#
#   examples/corpus.sh FOLDER
#
# The text is Perl's documentation, some 7 MB of technical English in 200 files, from Debian's package `perl-doc`;
# its licence is that of Perl: GPL 1 or later, or the Artistic License. Three files that are lists made by programs
# are left out. Where perl-doc is installed its files are taken; else the package is downloaded and unpacked, which
# needs apt and dpkg but no rights. The text is not part of this project.
set -euo pipefail
vocabulary=4096
folder=$(mkdir -p "${1:?usage: corpus.sh FOLDER}" && cd "$1" && pwd)
root=$(cd "$(dirname "$0")/.." && pwd)

# The files of a folder, in an order that mixes subjects and is always the same: that of their names' MD5.
pods() {
  find "$1" -path '*/pod/perl*.pod' ! -name perlapi.pod ! -name perltoc.pod ! -name perluniprops.pod |
    while read -r path; do echo "$(basename "$path" | md5sum | cut -c1-32) $path"; done |
    LC_ALL=C sort | cut -d' ' -f2-
}

text=$(pods /usr/share/perl)
if [ "$(wc -l <<<"$text")" -lt 100 ]; then
  if [ ! -d "$folder/perl-doc" ]; then
    (cd "$folder" && apt-get download perl-doc && dpkg-deb -x perl-doc_*.deb perl-doc)
  fi
  text=$(pods "$folder/perl-doc")
fi
readarray -t texts <<<"$text"
echo "$(cat "${texts[@]}" | wc -c) bytes of text in ${#texts[@]} files" >&2

cd "$root"
if [ ! -f "$folder/tokenizer.json" ]; then
  cargo run --quiet --release --locked -p runtime --example train_tokenizer -- "$vocabulary" "$folder/tokenizer.json" "${texts[@]}"
fi
cargo run --quiet --release --locked -p runtime --bin execute-plan -- \
  prepare "${texts[@]}" --tokenizer "$folder/tokenizer.json" --out "$folder/perl" --force
