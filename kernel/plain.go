package kernel

import (
	"bytes"
	"compress/gzip"
	"fmt"
	"io"
	"path"
	"strings"

	"github.com/klauspost/compress/zstd"
	"github.com/ulikunitz/xz"
)

// PlainModule reads a module as the kernel wants it: Debian compresses modules with xz, other kernels in other ways.
// The name of the result ends with .ko.
func PlainModule(name string, content io.Reader) (plainName string, plain []byte, err error) {
	switch path.Ext(name) {
	case ".ko":
		plain, err = io.ReadAll(content)
		return name, plain, err
	case ".xz":
		content, err = xz.NewReader(content)
	case ".zst":
		content, err = zstd.NewReader(content, zstd.WithDecoderConcurrency(1)) // which leaves nothing to close
	case ".gz":
		content, err = gzip.NewReader(content)
	default:
		err = fmt.Errorf("unknown module compression %q", path.Ext(name))
	}
	if err != nil {
		return "", nil, err
	}
	plain, err = io.ReadAll(content)
	return strings.TrimSuffix(name, path.Ext(name)), plain, err
}

// SignatureMark ends a module with a signature (MODULE_SIG_STRING in include/linux/module_signature.h).
const SignatureMark = "~Module signature appended~\n"

// Signed reports whether a module has a signature at its end. Whose it is, only the kernel knows.
func Signed(module []byte) bool {
	return bytes.HasSuffix(module, []byte(SignatureMark))
}
