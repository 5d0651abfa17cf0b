package disk

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
	journalMode   = "mode "
	journalSize   = 512
)

// Steps.
const (
	stepNone   = ""
	StepLayout = "layout" // the whole disk: partition table and all file systems
	StepFormat = "format" // one partition
	StepWipe   = "wipe"   // what a reset erases
	// StepEncrypt is a partition that is encrypted with what is on it.
	StepEncrypt = "encrypt"
	stepNewer   = "newer" // a step of a newer release; never written
)

// Journal is the step that was begun and not finished.
type Journal struct {
	Step  string
	Label string // the partition that is being formatted, or those to be wiped
	// Disks are the marks of other disks that are wiped first; nil for other steps.
	Disks []string
	// Mode is one of boot.WipeModes; "" for other steps.
	Mode string
}

// Interrupted reports whether the file system of a partition was being made.
func (j Journal) Interrupted(label string) bool { return j.Step == StepFormat && j.Label == label }

func readJournal(r io.ReaderAt) (Journal, error) {
	buf, err := readAt(r, journalAt, journalSize)
	if err != nil || !bytes.HasPrefix(buf, []byte(journalMagic)) {
		return Journal{}, err
	}
	text, known := strings.CutPrefix(string(buf), journalMagic+journalFormat)
	if !known {
		return Journal{Step: stepNewer}, nil
	}
	line, rest, _ := strings.Cut(text, "\n")
	step, label, _ := strings.Cut(line, " ")
	j := Journal{Step: step, Label: label}
	for line := range strings.Lines(rest) {
		if marks, is := strings.CutPrefix(line, journalDisks); is {
			j.Disks = strings.Fields(marks)
		} else if mode, is := strings.CutPrefix(line, journalMode); is {
			j.Mode = strings.TrimSpace(mode)
		}
	}
	return j, nil
}

// Note is WriteJournal for a disk that isn't open.
func (d Disk) Note(j Journal) error {
	return d.Change(func(file *os.File) error { return WriteJournal(file, j) })
}

// WriteJournal puts a step on the disk, or removes it.
func WriteJournal(f *os.File, j Journal) error {
	buf := make([]byte, journalSize)
	if j.Step != stepNone {
		text := journalMagic + journalFormat + strings.TrimSpace(j.Step+" "+j.Label) + "\n"
		if len(j.Disks) > 0 {
			text += journalDisks + strings.Join(j.Disks, " ") + "\n"
		}
		if j.Mode != "" { // after the disks, where earlier releases expect them
			text += journalMode + j.Mode + "\n"
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
