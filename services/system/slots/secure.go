package slots

import (
	"context"
	"io"
	"os"
	"strings"

	"github.com/garboard-os/garboard/boot/esp"
	"github.com/garboard-os/garboard/services/core/resource"
)

// Security is what this boot stands on. It says what the firmware and the kernel say: no proof for others.
type Security struct {
	SecureBoot string `yaml:"secureBoot" column:"SECURE BOOT"` // a state of esp
	Lockdown   string `yaml:"lockdown" column:"LOCKDOWN"`      // none, integrity or confidentiality
	// Measured says whether the TPM has measured a system that its owner has signed: "as signed", or why not.
	Measured string `yaml:"measured,omitempty" column:"MEASURED"`
	PCR7     string `yaml:"pcr7,omitempty"`  // SHA-256, hexadecimal: the firmware's keys and Secure Boot
	PCR11    string `yaml:"pcr11,omitempty"` // the system
	// Signer has signed the file of the running system; "": nobody, or the system isn't on the disk.
	Signer string `yaml:"signer,omitempty" column:"SIGNED BY"`
	// Problem is why that file can't be read, or why the firmware wouldn't start it again.
	Problem string `yaml:"problem,omitempty" column:"PROBLEM"`
}

// SecurityStatuses has one resource.
var SecurityStatuses = resource.Define[Security](resource.Definition{
	Type:      "SecurityStatuses.runtime.garboard.dev",
	Kind:      "SecurityStatus",
	Aliases:   []string{"security"},
	Namespace: "runtime",
})

// secure publishes it. Nothing of it keeps a node off.
func (s *Slots) secure(ctx context.Context) {
	measured := s.o.Disks.Measured()
	status := Security{
		SecureBoot: esp.SecureBoot(s.o.firmware), Lockdown: lockdown(s.o.lockdown),
		Measured: measured.Is, PCR7: measured.PCR7, PCR11: measured.PCR11,
	}
	if running := s.Running(); running != "" {
		s.mu.Lock() // others use the EFI system partition, too
		err := s.o.Disks.UseEFI(ctx, func(dir string) error {
			system, err := os.Open(esp.Partition(dir).System(running))
			if err != nil {
				return err
			}
			defer system.Close()
			size, err := system.Seek(0, io.SeekEnd)
			if err == nil {
				status.Signer, err = esp.Accepts(s.o.firmware, system, size)
			}
			return err
		})
		s.mu.Unlock()
		if err != nil {
			status.Problem = err.Error()
		}
	}
	if err := SecurityStatuses.Put(s.o.Store.As(ID), "machine", status); err != nil {
		s.o.Log.Error("publish the state of security", "err", err)
	}
}

// lockdownFile marks the current value with brackets (kernel_lockdown(7)).
const lockdownFile = "/sys/kernel/security/lockdown"

func lockdown(file string) string {
	text, _ := os.ReadFile(file) // a kernel without it isn't locked down
	_, rest, _ := strings.Cut(string(text), "[")
	if value, _, found := strings.Cut(rest, "]"); found {
		return value
	}
	return "none"
}
