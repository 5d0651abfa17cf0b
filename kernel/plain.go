package kernel

import (
	"bytes"
	"io"
	"path"
	"strings"
)

// PlainModule reads a module as the kernel wants it: Debian compresses modules with xz, other kernels in other ways.
// The name of the result ends with .ko.
func PlainModule(name string, content io.Reader) (plainName string, plain []byte, err error) {
	in, err := decompressor(name, content)
	if err != nil {
		return "", nil, err
	}
	defer in.Close()
	plain, err = io.ReadAll(in)
	if path.Ext(name) != ".ko" {
		name = strings.TrimSuffix(name, path.Ext(name))
	}
	return name, plain, err
}

// Signed reports whether a module has a signature at its end (MODULE_SIG_STRING in include/linux/module_signature.h).
// Whose it is, only the kernel knows.
func Signed(module []byte) bool {
	return bytes.HasSuffix(module, []byte("~Module signature appended~\n"))
}
