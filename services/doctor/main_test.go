package doctor

import (
	"io"
	"log"
)

// quiet is for servers whose clients refuse them on purpose.
var quiet = log.New(io.Discard, "", 0)
