package media

import (
	"bufio"
	"bytes"
	"crypto/sha256"
	"errors"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"github.com/diskfs/go-diskfs/partition/gpt"
	"github.com/klauspost/compress/zstd"

	"github.com/garboard-os/garboard/boot"
	"github.com/garboard-os/garboard/boot/esp"
	"github.com/garboard-os/garboard/boot/meta"
)

// slot is the one that has the system of an image.
const slot = "A"

// disk makes the compressed image of the smallest disk with the system on it, as an installation leaves it: the file
// systems of STATE and EPHEMERAL are made at the first boot, which gives EPHEMERAL the rest of the disk.
func (o Options) disk(uki []byte, to string) (err error) {
	work, err := os.MkdirTemp(filepath.Dir(to), ".media-*")
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, os.RemoveAll(work)) }()
	image, err := os.Create(filepath.Join(work, "disk"))
	if err != nil {
		return err
	}
	defer image.Close()
	size, all, err := o.places(work)
	if err != nil {
		return err
	}
	if err := image.Truncate(size); err != nil {
		return err
	}
	places := map[string]boot.Place{}
	sum := sha256.Sum256(uki)
	table := &gpt.Table{LogicalSectorSize: diskSector, PhysicalSectorSize: diskSector, ProtectiveMBR: true, GUID: guid(sum[:])}
	for i, p := range all {
		places[p.Label] = p
		own := sha256.Sum256(append(sum[:], p.Label...))
		table.Partitions = append(table.Partitions, &gpt.Partition{
			Index: i + 1, Name: p.Label, Type: gpt.Type(p.Type), Attributes: p.Attributes, GUID: guid(own[:]),
			Start: uint64(p.Start / diskSector), End: uint64((p.Start+p.Size)/diskSector) - 1,
		})
	}
	if err := table.Write(image, size); err != nil {
		return err
	}
	if p, has := places[boot.LabelMedium]; has {
		if err := copyFile(filepath.Join(work, mediumFile), image, p.Start); err != nil {
			return err
		}
	}
	slots, err := o.slots()
	if err != nil {
		return err
	}
	files, err := o.efi(filepath.Join(work, "efi"), uki, slots)
	if err != nil {
		return err
	}
	if err := writeFAT(image, places[boot.LabelEFI].Start, places[boot.LabelEFI].Size, boot.LabelEFI, files); err != nil {
		return err
	}
	if err := writeMeta(image, places[boot.LabelMeta], slots); err != nil {
		return err
	}
	if err := o.grubOn(image, places[boot.LabelBIOS]); err != nil {
		return err
	}
	made := filepath.Join(work, "compressed")
	if err := compress(image, size, made); err != nil {
		return err
	}
	return o.finish(made, to)
}

// mediumFile has the content of the partition with the configuration and the container images.
const mediumFile = "medium"

// places are the partitions of an image of that many bytes. What it has beside the system is made in the work
// directory, and lies before EPHEMERAL, which grows.
func (o Options) places(work string) (size int64, all []boot.Place, err error) {
	size, all = boot.MinDisk, boot.Places(boot.MinDisk)
	if o.Config == nil && o.Images == "" {
		return size, all, nil
	}
	dir := filepath.Join(work, "files")
	if err := os.Mkdir(dir, 0o700); err != nil {
		return 0, nil, err
	}
	label, err := o.added(dir, map[string][]byte{})
	if err != nil {
		return 0, nil, err
	}
	medium, err := writeVolume(filepath.Join(work, mediumFile), dir, label)
	if err != nil {
		return 0, nil, err
	}
	last := len(all) - 1
	all = slices.Insert(all, last, boot.Place{Volume: boot.Volume{Label: boot.LabelMedium, Type: boot.TypeMedium}, Start: all[last].Start, Size: medium})
	all[last+1].Start += medium
	return size + medium, all, nil
}

// slots are those of a machine that was just installed.
func (o Options) slots() (slots boot.Slots, err error) {
	slots.B.State = boot.SlotEmpty
	if err = slots.Write(slot, epoch); err == nil {
		err = slots.Written(slot, boot.Slot{Version: o.Version, Args: strings.Fields(o.cmdline())}, epoch)
	}
	return slots, err
}

// efi are the files of the EFI system partition. It makes them in a directory.
func (o Options) efi(dir string, uki []byte, slots boot.Slots) (files []fatFile, err error) {
	systemdBoot, err := o.systemdBoot()
	if err != nil {
		return nil, err
	}
	partition := esp.Partition(dir)
	if err := partition.Loaders(systemdBoot); err != nil {
		return nil, err
	}
	if err := os.WriteFile(partition.System(slot), uki, 0o600); err != nil {
		return nil, err
	}
	if err := partition.Start(slots); err != nil {
		return nil, err
	}
	tree := os.DirFS(dir)
	err = fs.WalkDir(tree, ".", func(path string, entry fs.DirEntry, err error) error {
		if err != nil || entry.IsDir() {
			return err
		}
		content, err := fs.ReadFile(tree, path)
		files = append(files, fatFile{"/" + path, content})
		return err
	})
	return files, err
}

// part is a part of a file.
type part struct {
	io.ReaderAt
	io.WriterAt
	sync func() error
}

func (p part) Sync() error { return p.sync() }

func writeMeta(image *os.File, at boot.Place, slots boot.Slots) error {
	to := part{io.NewSectionReader(image, at.Start, at.Size), io.NewOffsetWriter(image, at.Start), image.Sync}
	return meta.Update(to, at.Size, func(c meta.Change) error { return boot.SlotsKey.Put(c, slots) })
}

// grubOn makes a BIOS start the image.
func (o Options) grubOn(image *os.File, at boot.Place) error {
	record, err := os.ReadFile(filepath.Join(o.Loader.Disk, esp.GRUBRecord))
	if err != nil {
		return err
	}
	program, err := os.ReadFile(filepath.Join(o.Loader.Disk, esp.GRUBProgram))
	if err != nil {
		return err
	}
	return esp.BootRecord(image, record, program, at.Start, at.Size)
}

// blockSize is the size of what is compressed at once, in bytes: partitions begin and end at whole ones.
const blockSize = 1 << 20

// compress writes a file in frames of zstd (RFC 8878, 3.1), one after the other. Most of a disk is empty: a frame of
// zeros is made once.
func compress(image *os.File, size int64, made string) error {
	out, err := os.Create(made)
	if err != nil {
		return err
	}
	defer out.Close()
	// with more, the bytes aren't the same each time
	encoder, err := zstd.NewWriter(nil, zstd.WithEncoderConcurrency(1))
	if err != nil {
		return err
	}
	defer encoder.Close()
	to, block, zeros := bufio.NewWriter(out), make([]byte, blockSize), make([]byte, blockSize)
	empty := encoder.EncodeAll(zeros, nil)
	for at := int64(0); at < size; at += blockSize {
		if _, err := image.ReadAt(block, at); err != nil {
			return err
		}
		frame := empty
		if !bytes.Equal(block, zeros) {
			frame = encoder.EncodeAll(block, nil)
		}
		if _, err := to.Write(frame); err != nil {
			return err
		}
	}
	return errors.Join(to.Flush(), out.Sync())
}
