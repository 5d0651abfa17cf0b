// Command installer is the program in the installer image. When another image is built from that image, it customizes
// the system in it: the instructions that start it are part of the installer image (package media). It is all that runs
// there: the image has no shell.
package main

import (
	"context"
	_ "embed"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"os/signal"
	"path/filepath"
	"strings"

	"github.com/garboard-os/garboard/boot/esp"
	"github.com/garboard-os/garboard/image/customize"
	"golang.org/x/sys/unix"
)

//go:embed usage.txt
var usage string

func main() {
	if len(os.Args) != 2 {
		fmt.Fprint(os.Stderr, usage)
		os.Exit(2)
	}
	ctx, stop := signal.NotifyContext(context.Background(), unix.SIGTERM, unix.SIGINT)
	defer stop()
	err := run(ctx, os.Args[1])
	if err != nil {
		fmt.Fprintln(os.Stderr, "error:", err)
		os.Exit(1)
	}
}

// run customizes the system in this image with the files of a directory, and removes the directory.
func run(ctx context.Context, dir string) error {
	files, err := os.ReadDir(dir)
	if err != nil {
		return err
	}
	if len(files) == 0 {
		return errors.New("the stage customization has no files. BuildKit before 0.17 doesn't build the stage: use a later one, or the classic builder (DOCKER_BUILDKIT=0)")
	}
	c, err := change(dir, os.Getenv("RM"))
	if err != nil {
		return err
	}
	if err := c.Apply(ctx, "/"+esp.InstallDir, func(line string) { fmt.Println(line) }); err != nil {
		return err
	}
	return os.RemoveAll(dir)
}

// change is what the files of the stage, and the paths of a list, say.
func change(dir, remove string) (c customize.Change, err error) {
	c = customize.Change{
		Remove:      strings.Fields(remove),
		Overlays:    []customize.Overlay{{Name: "stage customization", Dir: dir, Without: []string{customize.StageExtensions}}},
		KernelLater: true,
	}
	extensions, err := os.ReadDir(filepath.Join(dir, customize.StageExtensions))
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return c, err
	}
	for _, e := range extensions {
		c.Extensions = append(c.Extensions, filepath.Join(dir, customize.StageExtensions, e.Name()))
	}
	return c, nil
}
