package server

import (
	"os"
	"strings"

	"github.com/garboard-os/garboard/boot"
)

// The list has a line for each machine: its UUID and, after it has sealed something, the fingerprint of its key. What
// follows # is a comment. Without its line, a machine gets nothing any more.

func readList(path string) ([]string, error) {
	text, err := os.ReadFile(path)
	return strings.Split(strings.TrimRight(string(text), "\n"), "\n"), boot.IgnoreMissing(err)
}

func writeList(path string, lines []string) error {
	return boot.WriteFile(path, []byte(strings.Join(lines, "\n")+"\n"), secret)
}

func parse(line string) (uuid, fingerprint string) {
	line, _, _ = strings.Cut(line, "#")
	words := append(strings.Fields(line), "", "")
	return words[0], words[1]
}
