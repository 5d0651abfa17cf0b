package media

import (
	"bytes"
	"encoding/binary"
	"io"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/diskfs/go-diskfs/backend/file"
	"github.com/diskfs/go-diskfs/filesystem/fat32"
	"github.com/diskfs/go-diskfs/filesystem/iso9660"
	"github.com/diskfs/go-diskfs/partition/gpt"
	"github.com/klauspost/compress/zstd"

	"github.com/garboard-os/garboard/boot"
	"github.com/garboard-os/garboard/boot/meta"
)

// unpack returns the image of a disk, with its partitions.
func unpack(t *testing.T, path string, size int64) (*os.File, *gpt.Table) {
	t.Helper()
	packed, err := zstd.NewReader(bytes.NewReader(read(t, path)))
	if err != nil {
		t.Fatal(err)
	}
	defer packed.Close()
	image, err := os.Create(filepath.Join(t.TempDir(), "disk"))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { image.Close() })
	if n, err := io.Copy(image, packed); err != nil || n != size {
		t.Fatalf("%d bytes, %v", n, err)
	}
	table, err := gpt.Read(image, diskSector, diskSector)
	if err != nil {
		t.Fatal(err)
	}
	if err := table.Verify(image, uint64(size)); err != nil {
		t.Error(err)
	}
	return image, table
}

// A configuration and container images lie in a partition of the disk's image, before the one that grows.
func TestDiskImageWithMore(t *testing.T) {
	o := options(t)
	o.Config, o.Images = []byte("machine: {}\n"), filepath.Join(t.TempDir(), "images.tar")
	images := bytes.Repeat([]byte("image"), 250*isoSector) // whole sectors
	if err := os.WriteFile(o.Images, images, 0o600); err != nil {
		t.Fatal(err)
	}
	path := build(t, o, Disk)
	if info, err := os.Stat(path); err != nil || info.Mode() != 0o600 {
		t.Errorf("the file with keys has mode %v, %v", info.Mode(), err)
	}
	const size = 3 << 20
	image, table := unpack(t, path, boot.MinDisk+size)
	places := boot.Places(boot.MinDisk)
	last := len(places) - 1
	medium, ephemeral := table.Partitions[last], table.Partitions[last+1]
	if medium.Name != boot.LabelMedium || string(medium.Type) != boot.TypeMedium || int64(medium.Start)*diskSector != places[last].Start || medium.Size != size {
		t.Errorf("%+v", medium)
	}
	if ephemeral.Name != boot.LabelEphemeral || ephemeral.Start != medium.End+1 || int64(ephemeral.Size) != places[last].Size {
		t.Errorf("%+v", ephemeral)
	}
	volume, err := os.Create(filepath.Join(t.TempDir(), "volume"))
	if err == nil {
		defer volume.Close()
		_, err = io.Copy(volume, io.NewSectionReader(image, int64(medium.Start)*diskSector, size))
	}
	if err != nil {
		t.Fatal(err)
	}
	iso, err := iso9660.Read(file.New(volume, true), 0, 0, isoSector)
	if err != nil {
		t.Fatal(err)
	}
	if label := strings.TrimSpace(iso.Label()); label != boot.ISOLabel || !bytes.Equal(content(t, iso, "/"+boot.ISOFile), o.Config) || !bytes.Equal(content(t, iso, "/"+boot.BundleFile), images) {
		t.Errorf("the volume %q has other files", label)
	}
	// Linux reads the directory with the long names (Joliet): the root directory's record is at 156 of its descriptor,
	// and has its sector at 2.
	descriptor, root := make([]byte, isoSector), make([]byte, 1)
	if _, err := volume.ReadAt(descriptor, (firstDescriptor+1)*isoSector); err != nil || descriptor[0] != 2 {
		t.Fatalf("the second descriptor is of kind %d, %v", descriptor[0], err)
	}
	if _, err := volume.ReadAt(root, int64(binary.LittleEndian.Uint32(descriptor[156+2:]))*isoSector); err != nil || root[0] != 34 {
		t.Errorf("its first record has %d bytes, not 34: %v", root[0], err)
	}
	if !bytes.Equal(read(t, build(t, o, Disk)), read(t, path)) {
		t.Error("a second build differs")
	}
}

// The image of a disk is one as an installation leaves it.
func TestDiskImage(t *testing.T) {
	o := options(t)
	image, table := unpack(t, build(t, o, Disk), boot.MinDisk)
	places := boot.Places(boot.MinDisk)
	for i, p := range places {
		got := table.Partitions[i]
		if got.Name != p.Label || !strings.EqualFold(string(got.Type), p.Type) || got.Attributes != p.Attributes ||
			int64(got.Start)*diskSector != p.Start || int64(got.Size) != p.Size {
			t.Errorf("%+v, want %+v", got, p)
		}
	}
	fat, err := fat32.Read(file.New(image, true), places[0].Size, places[0].Start, diskSector)
	if err != nil {
		t.Fatal(err)
	}
	if got := string(content(t, fat, BootFile)); got != "systemd-boot" {
		t.Errorf("UEFI starts %q", got)
	}
	if !bytes.Equal(content(t, fat, "/EFI/garboard/A.efi"), read(t, build(t, o, UKI))) {
		t.Error("slot A has another system")
	}
	if entry := string(content(t, fat, "/loader/entries/garboard-a+1.conf")); !strings.HasSuffix(entry, " console=ttyS1 garboard.slot=A garboard.trial=alone\n") {
		t.Error(entry)
	}
	at := places[2]
	from := part{io.NewSectionReader(image, at.Start, at.Size), io.NewOffsetWriter(image, at.Start), image.Sync}
	if err := meta.Update(from, at.Size, func(c meta.Change) error {
		slots, err := boot.SlotsKey.In(c)
		if slots.Next() != "A" || slots.A.Version != o.Version {
			t.Errorf("%+v", slots)
		}
		return err
	}); err != nil {
		t.Error(err)
	}
	record := make([]byte, 440)
	if _, err := image.ReadAt(record, 0); err != nil || record[0] != 'r' {
		t.Errorf("a BIOS starts % x", record[:16])
	}
}
