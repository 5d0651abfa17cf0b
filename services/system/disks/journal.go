package disks

import (
	"bytes"
	"fmt"
	"io"
	"os"
	"strings"
)

// The journal says on the disk itself what is being done to it, so that a power
// cut in the middle leaves neither a disk that looks foreign nor a file system
// that looks finished. It is one sector, which disks write whole or not at all,
// in the gap between partition table and first partition:
//
//	step written, synced ─▶ the step is done, synced ─▶ step cleared, synced
//
// A step that is found on the disk is done again from its beginning: nothing of
// value can be there. What a reset erases is written down while the node still runs,
// and done on its way out, or, if it doesn't get there, before the next boot uses
// anything of the disk (see wipe.go).
const (
	journalAt    = 1<<20 - 4096
	journalMagic = "garboard journal "
	// journalFormat is raised by a release whose journals this one can't read.
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
	stepNewer  = "newer"  // something of a newer release; never written
)

// journal is what was begun and not finished.
type journal struct {
	step  string
	label string // the partition that is being formatted, or those that are wiped
	// disks are the marks of other disks that are wiped first; nil for other steps.
	disks []string
}

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
	// The sector may be 4 KiB; the kernel then reads and writes the whole of it.
	if _, err := f.WriteAt(buf, journalAt); err != nil {
		return fmt.Errorf("write journal on %s: %w", f.Name(), err)
	}
	if err := f.Sync(); err != nil {
		return fmt.Errorf("sync %s: %w", f.Name(), err)
	}
	return nil
}
