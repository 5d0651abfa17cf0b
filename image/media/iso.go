package media

import (
	"bytes"
	"crypto/sha256"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"slices"

	"github.com/diskfs/go-diskfs/backend/file"
	"github.com/diskfs/go-diskfs/filesystem/iso9660"
	"github.com/diskfs/go-diskfs/partition/gpt"

	"github.com/garboard-os/garboard/boot/esp"
	"github.com/garboard-os/garboard/image/loader"
)

const (
	isoSector  = 2048
	diskSector = 512

	// The volume descriptors of ISO 9660 (ECMA-119, 8.1) begin at this sector. One of them points to the boot catalog
	// (El Torito, 2.0).
	firstDescriptor = 16
	descriptorBoot  = 0
	descriptorEnd   = 255
	catalogField    = 0x47
	// The name of a volume, filled up with blanks, and its dates, of dateSize bytes each (ECMA-119, 8.4.7, 8.4.26 to
	// 8.4.29).
	dateField, dateSize = 813, 17
	dates               = 4
	nameField, nameSize = 40, 32
	descriptorPrimary   = 1

	// The record of the first directory in a descriptor, and places in the record of a file (ECMA-119, 9.1): its sector
	// and size, its time, which ends with the zone, its flags, of which one says that it is a directory, and its name.
	rootField, recordSector, recordSize, recordTime, recordFlags, recordDirectory, recordName = 156, 2, 10, 18, 25, 2, 33

	// Entries of the boot catalog: validation, the BIOS's image, a header, and UEFI's image (El Torito, 2.1 to 2.5).
	catalogEntry  = 32
	catalogImages = 4 * catalogEntry
	imageField    = 8

	mib = 1 << 20

	// gptSectors is the size of a partition table with its entries.
	gptSectors = 33
)

// Names in the ISO's file system.
const (
	biosFile = "bios.img"
	efiFile  = "efi.img"
	lastFile = "zz" // by its name
)

// writeISO makes an image of a CD from the files in dir, of which biosFile and efiFile are what firmware boots. It is
// also one of a disk: copied to a USB stick, BIOSes start the boot record, and UEFI finds the partition with efiFile.
func writeISO(to, dir, label string, boots loader.Loader) (err error) {
	size, err := os.Stat(filepath.Join(dir, efiFile)) // the library removes the directory
	if err != nil {
		return err
	}
	out, err := os.OpenFile(to, os.O_RDWR|os.O_CREATE|os.O_TRUNC, 0o644)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, out.Close()) }()
	bios := &iso9660.ElToritoEntry{Platform: iso9660.BIOS, Emulation: iso9660.NoEmulation, BootFile: "/" + biosFile, BootTable: true}
	efi := &iso9660.ElToritoEntry{Platform: iso9660.EFI, Emulation: iso9660.NoEmulation, BootFile: "/" + efiFile}
	// The count of sectors has 16 bits. UEFI takes 0 as the rest of the medium (UEFI 2.10, 13.3.2.1).
	efi.SetLoadSize(0)
	catalog, err := files(out, dir, label, &iso9660.ElTorito{HideBootCatalog: true, Entries: []*iso9660.ElToritoEntry{bios, efi}})
	if err != nil {
		return err
	}
	if catalog == 0 {
		return errors.New("ISO 9660: no boot record")
	}
	images := make([]byte, catalogImages)
	if _, err := out.ReadAt(images, catalog*isoSector); err != nil {
		return fmt.Errorf("boot catalog: %w", err)
	}
	at := func(entry int) uint64 {
		return uint64(binary.LittleEndian.Uint32(images[entry*catalogEntry+imageField:])) * (isoSector / diskSector)
	}
	if err := hybrid(out, at(3), uint64(size.Size()/diskSector)); err != nil {
		return err
	}
	return errors.Join(bootRecord(out, boots, at(1)), out.Sync())
}

// writeVolume makes a file system with the files in dir, and returns its size in bytes: whole MiB, as partitions have.
func writeVolume(to, dir, label string) (size int64, err error) {
	out, err := os.OpenFile(to, os.O_RDWR|os.O_CREATE|os.O_EXCL, 0o600)
	if err != nil {
		return 0, err
	}
	defer func() { err = errors.Join(err, out.Close()) }()
	if _, err := files(out, dir, label, nil); err != nil {
		return 0, err
	}
	if size, err = out.Seek(0, io.SeekEnd); err != nil {
		return 0, err
	}
	return (size + mib - 1) / mib * mib, nil
}

// files makes a file system of the files in dir, and returns the sector of the boot catalog; 0: it has none.
func files(out *os.File, dir, label string, boots *iso9660.ElTorito) (catalog int64, err error) {
	// go-diskfs 1.9.4 writes a block of zeros behind a file of whole blocks. Behind the last file is the directory with
	// the long names.
	if err := os.WriteFile(filepath.Join(dir, lastFile), []byte("\n"), 0o600); err != nil {
		return 0, err
	}
	fs, err := iso9660.Create(file.New(out, false), 0, 0, isoSector, dir)
	if err == nil {
		err = fs.Finalize(iso9660.FinalizeOptions{VolumeIdentifier: label, Joliet: true, ElTorito: boots})
	}
	if err != nil {
		return 0, fmt.Errorf("ISO 9660: %w", err)
	}
	return descriptors(out)
}

// descriptors completes the volume descriptors, and returns the sector of the boot catalog.
func descriptors(out *os.File) (catalog int64, err error) {
	var all [][]byte
	for at := int64(firstDescriptor); ; at++ {
		d := make([]byte, isoSector)
		if _, err := out.ReadAt(d, at*isoSector); err != nil {
			return 0, fmt.Errorf("volume descriptor: %w", err)
		}
		if d[0] == descriptorEnd {
			break
		}
		if d[0] == descriptorBoot {
			catalog = int64(binary.LittleEndian.Uint32(d[catalogField:]))
		} else {
			complete(d)
			err = errors.Join(err, inUTC(out, d[rootField:]))
		}
		all = append(all, d)
	}
	// BIOSes look for the boot record in the second place only (El Torito, 2.0); the library writes it as the last one.
	first := []byte{descriptorBoot, descriptorPrimary} // the last of these is the first; others follow
	slices.SortStableFunc(all, func(a, b []byte) int { return bytes.IndexByte(first, b[0]) - bytes.IndexByte(first, a[0]) })
	_, failed := out.WriteAt(bytes.Join(all, nil), firstDescriptor*isoSector)
	return catalog, errors.Join(err, failed)
}

// complete gives a volume a constant time, and its name the right form.
func complete(d []byte) {
	if name := d[nameField : nameField+nameSize]; d[0] == descriptorPrimary {
		copy(name, bytes.ReplaceAll(name, []byte{0}, []byte(" "))) // the library fills it up with zeros
	}
	for i := range dates {
		date := d[dateField+i*dateSize : dateField+(i+1)*dateSize]
		copy(date, epoch.Format("20060102150405")+"00")
		date[dateSize-1] = 0 // UTC
	}
}

// inUTC gives a directory, and all that is in it, a constant time: the library writes that of files in the time zone of
// this machine.
func inUTC(out *os.File, record []byte) (err error) {
	utc := []byte{byte(epoch.Year() - 1900), byte(epoch.Month()), byte(epoch.Day()), 0, 0, 0, 0}
	copy(record[recordTime:], utc)
	dir, at := make([]byte, binary.LittleEndian.Uint32(record[recordSize:])), int64(binary.LittleEndian.Uint32(record[recordSector:]))*isoSector
	if _, err = out.ReadAt(dir, at); err != nil {
		return err
	}
	for i := 0; i < len(dir); i += max(int(dir[i]), 1) { // a record begins with its length; zeros fill a sector up
		if entry := dir[i:]; entry[0] > 0 {
			copy(entry[recordTime:], utc)
			// The names of the directory itself and of the one above are the bytes 0 and 1.
			if entry[recordFlags]&recordDirectory != 0 && (entry[recordName-1] > 1 || entry[recordName] > 1) {
				err = errors.Join(err, inUTC(out, entry))
			}
		}
	}
	_, failed := out.WriteAt(dir, at)
	return errors.Join(err, failed)
}

// hybrid adds a partition table with UEFI's image as a partition.
func hybrid(out *os.File, start, sectors uint64) error {
	end, err := out.Seek(0, io.SeekEnd)
	if err != nil {
		return err
	}
	size := (end + gptSectors*diskSector + mib - 1) / mib * mib // hypervisors want disks of whole MiB
	if err := out.Truncate(size); err != nil {
		return err
	}
	hash := sha256.New()
	if _, err := io.Copy(hash, io.NewSectionReader(out, 0, size)); err != nil {
		return err
	}
	sum := hash.Sum(nil)
	table := &gpt.Table{
		LogicalSectorSize: diskSector, PhysicalSectorSize: diskSector, ProtectiveMBR: true, GUID: guid(sum[:16]),
		Partitions: []*gpt.Partition{{Index: 1, Start: start, End: start + sectors - 1, Size: sectors * diskSector, Type: gpt.EFISystemPartition, Name: "EFI", GUID: guid(sum[16:])}},
	}
	if err := table.Write(out, size); err != nil {
		return fmt.Errorf("partition table: %w", err)
	}
	return nil
}

// guid makes an identity of 16 bytes of a hash (RFC 9562, version 8).
func guid(sum []byte) string {
	b := bytes.Clone(sum[:16])
	b[6] = b[6]&0x0f | 0x80
	b[8] = b[8]&0x3f | 0x80
	return fmt.Sprintf("%X-%X-%X-%X-%X", b[0:4], b[4:6], b[6:8], b[8:10], b[10:])
}

// Places in GRUB's images (grub-core/boot/i386/pc/boot.S, cdboot.S and diskboot.S). Addresses of disks are in sectors
// of 512 bytes.
const (
	recordCode    = 440   // bytes of the boot record before the disk's signature
	recordAddress = 0x1b0 // in boot_hybrid.img: where the program begins, after cdboot.img
	cdbootSectors = 4     // the size of cdboot.img
	listAddress   = 0x9f4 // in the image: the first sector after diskboot.img
)

// bootRecord writes the code that a BIOS starts from a disk. It loads the same program as the CD's.
func bootRecord(out *os.File, boots loader.Loader, image uint64) error {
	if len(boots.BootHybrid) < recordCode {
		return errors.New("GRUB's boot record is too short")
	}
	code := bytes.Clone(boots.BootHybrid[:recordCode])
	binary.LittleEndian.PutUint64(code[recordAddress:], image+cdbootSectors)
	if _, err := out.WriteAt(code, 0); err != nil {
		return err
	}
	if err := esp.Activate(out); err != nil {
		return err
	}
	list := make([]byte, 8)
	binary.LittleEndian.PutUint64(list, image+cdbootSectors+1)
	_, err := out.WriteAt(list, int64(image)*diskSector+listAddress)
	return err
}
