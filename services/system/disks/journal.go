package disks

import (
	"bytes"
	"fmt"
	"io"
	"os"
	"strings"
)

// The journal records on the disk itself which change is in progress. Without
// it, a power cut during the change could leave a disk that looks foreign, or a
// file system that looks complete. It is one sector, which disks write
// atomically, in the gap between partition table and first partition:
//
//	step written, synced ─▶ the step is done, synced ─▶ step cleared, synced
//
// A step that is found on the disk is repeated from its beginning: there can't
// be any data of value yet. What a reset erases is recorded while the node
// still runs, and erased during the shutdown. If that isn't possible, it is
// erased before the next boot uses anything of the disk (see wipe.go).
const (
	journalAt    = 1<<20 - 4096
	journalMagic = "garboard journal "
	// journalFormat is incremented by a release whose journals this one can't read.
	journalFormat = "1: "
	journalDisks  = "disks "
	journalSize   = 512
)

// Steps.
const (
	stepNone   = ""
	stepLayout = "layout" // the whole disk: partition table and all file systems
	stepFormat = "format" // one partition
	stepWipe   = "wipe"   // what a reset erases
	stepNewer  = "newer"  // a step of a newer release; never written
)

// journal is the step that was begun and not finished.
type journal struct {
	step  string
	label string // the partition that is being formatted, or those to be wiped
	// disks are the marks of other disks that are wiped first; nil for other steps.
	disks []string
}

// interrupted reports whether the file system of a volume was being made.
func (j journal) interrupted(v volume) bool { return j.step == stepFormat && j.label == v.Label }

func readJournal(r io.ReaderAt) (journal, error) {
	buf, err := read(r, journalAt, journalSize)
	if err != nil || !bytes.HasPrefix(buf, []byte(journalMagic)) {
		return journal{}, err
	}
	text, known := strings.CutPrefix(string(buf), journalMagic+journalFormat)
	if !known {
		return journal{step: stepNewer}, nil
	}
	line, rest, _ := strings.Cut(text, "\n")
	step, label, _ := strings.Cut(line, " ")
	j := journal{step: step, label: label}
	if line, _, _ := strings.Cut(rest, "\n"); strings.HasPrefix(line, journalDisks) {
		j.disks = strings.Fields(strings.TrimPrefix(line, journalDisks))
	}
	return j, nil
}

func writeJournal(f *os.File, j journal) error {
	buf := make([]byte, journalSize)
	if j.step != stepNone {
		text := journalMagic + journalFormat + strings.TrimSpace(j.step+" "+j.label) + "\n"
		if len(j.disks) > 0 {
			text += journalDisks + strings.Join(j.disks, " ") + "\n"
		}
		if copy(buf, text) < len(text) {
			return fmt.Errorf("write journal on %s: %d bytes are more than a sector", f.Name(), len(text))
		}
	}
	// The sector may have 4 KiB; the kernel then reads and writes all of it.
	if _, err := f.WriteAt(buf, journalAt); err != nil {
		return fmt.Errorf("write journal on %s: %w", f.Name(), err)
	}
	if err := f.Sync(); err != nil {
		return fmt.Errorf("sync %s: %w", f.Name(), err)
	}
	return nil
}
