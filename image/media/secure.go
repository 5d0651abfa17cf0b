package media

import (
	"bytes"
	"debug/pe"
	"fmt"

	"github.com/garboard-os/garboard/boot/esp"
	"github.com/garboard-os/garboard/image/secureboot"
)

// A medium whose system is signed starts systemd-boot first: in a firmware in setup mode, its menu has an entry that
// enrols the owner's keys, and asks before (systemd-boot(7), loader.conf(5)). Without an answer, the system starts.
const (
	mediumSystem = "/EFI/Linux/garboard.efi" // systemd-boot finds it there
	enrolDir     = "/loader/keys/auto/"
	enrolConfig  = "timeout 10\neditor no\nsecure-boot-enroll manual\n"
)

// enrolling are the files of a medium that enrols the owner's keys.
func (o Options) enrolling(uki []byte) ([]fatFile, error) {
	systemdBoot, err := o.systemdBoot()
	if err != nil {
		return nil, err
	}
	files := []fatFile{{BootFile, systemdBoot}, {mediumSystem, uki}, {"/loader/loader.conf", []byte(enrolConfig)}}
	for _, name := range []string{secureboot.PK, secureboot.KEK, secureboot.DB} {
		if content := o.Secure.Enrolment[name+".auth"]; content != nil {
			files = append(files, fatFile{enrolDir + name + ".auth", content})
		}
	}
	return files, nil
}

// systemdBoot is the boot loader, signed if the system is.
func (o Options) systemdBoot() ([]byte, error) {
	content, err := o.Loader.SystemdBoot()
	if err != nil || o.Secure == nil {
		return content, err
	}
	if content, err = o.Secure.DB.Sign(content); err != nil {
		return nil, fmt.Errorf("sign %s: %w", esp.SystemdBoot, err)
	}
	return content, nil
}

// signed is a unified kernel image that is signed, with the signature of what a TPM measures of it.
func (o Options) signed(sections []section, linux section) ([]byte, error) {
	key, err := o.Secure.PolicyKey()
	if err != nil {
		return nil, err
	}
	sections = append(sections, section{name: esp.SectionPolicyKey, content: key})
	var all []secureboot.Section
	for _, s := range append(sections, linux) {
		all = append(all, secureboot.Section{Name: s.name, Content: s.content})
	}
	stub, err := pe.NewFile(bytes.NewReader(o.Loader.Stub))
	if err != nil {
		return nil, fmt.Errorf("boot stub: %w", err)
	}
	if s := stub.Section(".sbat"); s != nil {
		content, err := s.Data()
		if err != nil {
			return nil, fmt.Errorf("boot stub: %w", err)
		}
		all = append(all, secureboot.Section{Name: s.Name, Content: content[:min(int(s.VirtualSize), len(content))]})
	}
	policy, err := o.Secure.PolicySignature(all)
	if err != nil {
		return nil, err
	}
	image, err := unified(o.Loader.Stub, append(sections, section{name: esp.SectionPolicySignature, content: policy}, linux))
	if err != nil {
		return nil, err
	}
	return o.Secure.DB.Sign(image)
}
