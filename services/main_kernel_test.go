//go:build kernel

package services

import (
	"context"
	"os"
	"testing"

	"github.com/garboard-os/garboard/services/system/install"
	"github.com/garboard-os/garboard/tools/testing/uml"
)

// TestMain is also the program of PID 1 in the systems that the tests install: these write themselves to their slot.
func TestMain(m *testing.M) {
	if len(os.Args) == 2 && os.Args[1] == install.Command {
		os.Exit(install.Main(context.Background(), os.Stdin, os.Stdout, os.NewFile(install.Descriptor, "slot")))
	}
	uml.Main(m)
}
