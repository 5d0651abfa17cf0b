package logs

import (
	"bytes"
	"cmp"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
)

// CrashID is the log with what the kernel stored when it died in an earlier boot.
const CrashID = "crash"

// dump is a file with a piece of the kernel's log. Its first line is "Panic#2 Part3": pieces
// count from the end of the log.
type dump struct {
	path         string
	text         []byte
	number, part int
}

// Crash reads the dumps in the pstore file system at dir (Linux,
// Documentation/admin-guide/pstore-blk.rst): their lines, oldest first, and the reason of the
// panic, if there is one. forget removes them: firmware has little memory for them.
func Crash(dir string) (lines []string, why string, forget func() error) {
	paths, _ := filepath.Glob(filepath.Join(dir, "dmesg-*")) // the pattern is right
	var dumps []dump
	for _, path := range paths {
		data, err := os.ReadFile(path)
		if err != nil {
			continue
		}
		d := dump{path: path, text: data}
		head, text, _ := bytes.Cut(data, []byte("\n"))
		_, numbers, _ := strings.Cut(string(head), "#")
		if n, _ := fmt.Sscanf(numbers, "%d Part%d", &d.number, &d.part); n == 2 {
			d.text = text
		}
		dumps = append(dumps, d)
	}
	slices.SortFunc(dumps, func(a, b dump) int {
		return cmp.Or(cmp.Compare(a.number, b.number), cmp.Compare(b.part, a.part), strings.Compare(a.path, b.path))
	})
	for _, d := range dumps {
		for line := range strings.Lines(strings.ToValidUTF8(string(d.text), "?")) {
			lines = append(lines, strings.TrimRight(line, "\n"))
			if _, reason, ok := strings.Cut(line, "Kernel panic - not syncing: "); ok {
				why = strings.TrimSpace(reason)
			}
		}
	}
	return lines, why, func() error {
		for _, d := range dumps {
			if err := os.Remove(d.path); err != nil {
				return err
			}
		}
		return nil
	}
}
